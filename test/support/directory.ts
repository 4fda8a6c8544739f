import { chmod, mkdtemp, readdir, readFile, rm, statfs, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { isAlive, stopLeftover } from '../../src/left-behind.ts'
import { cleanUp, type Scope } from './cleanup.ts'

const PREFIX = 'waybill-test-'
/** Linux keeps it in memory, also what a killed run leaves there, until the next run. */
const IN_MEMORY = '/dev/shm'
/** Ten times what a run of all tests takes, as others need memory, too. */
const ROOM_BYTES = 4 * 2 ** 30
/** Where in a directory a Postgres may have its data: the test run's own, or that of a service without DATABASE_URL. */
const DATA = ['postgres', '.waybill/postgres']

/** Where files can be made and removed by the thousand: some file systems take the longer to make one, the more have just been removed. */
export async function placeForMany(): Promise<string> {
  const { bavail, bsize } = await statfs(IN_MEMORY).catch(() => ({ bavail: 0, bsize: 0 }))
  return Math.min(bavail * bsize, process.availableMemory()) >= ROOM_BYTES ? IN_MEMORY : tmpdir()
}

/** An empty directory that remembers which process made it, so that a later run can sweep up after a killed one. */
export async function makeDirectory(parent = tmpdir()): Promise<string> {
  const directory = await mkdtemp(join(parent, PREFIX))
  // As root, Postgres runs as another user, who must be able to pass through.
  await chmod(directory, 0o755)
  await writeFile(join(directory, 'owner.pid'), String(process.pid))
  return directory
}

/** Removes a directory, and ends the Postgres that still runs in it, if any. */
export async function removeDirectory(directory: string): Promise<void> {
  for (const data of DATA) await stopLeftover(join(directory, data))
  await rm(directory, { recursive: true, force: true, maxRetries: 20 })
}

/** Removes what runs that were killed have left behind. */
export async function sweepDirectories(): Promise<void> {
  for (const parent of [IN_MEMORY, tmpdir()]) {
    const names = await readdir(parent).catch(() => [])
    for (const name of names.filter((entry) => entry.startsWith(PREFIX))) {
      const directory = join(parent, name)
      const owner = Number(await readFile(join(directory, 'owner.pid'), 'utf8').catch(() => Number.NaN))
      if (owner > 1 && !(await isAlive(owner))) await removeDirectory(directory).catch(() => {})
    }
  }
}

/** A directory for a service that brings its own Postgres, removed after the test together with what still runs in it. */
export async function createDirectory(scope: Scope): Promise<string> {
  const directory = await makeDirectory()
  cleanUp(scope, () => removeDirectory(directory))
  return directory
}
