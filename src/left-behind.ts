import { execFile } from 'node:child_process'
import { readFile, readlink, realpath, writeFile } from 'node:fs/promises'
import { resolve } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { promisify } from 'node:util'

// What a killed run may have left behind: the name of a process in a file, and a Postgres that still runs.

/** Notes in `file` that it is this process's. Throws if another one has, and is alive. */
export async function takeOver(file: string): Promise<void> {
  const known = (await read(file)) ?? ''
  const owner = Number.parseInt(known, 10)
  if (owner !== process.pid && (await isAlive(owner)) && [String(owner), await nameOf(owner)].includes(known)) {
    throw new Error(
      `the embedded Postgres is in use by process ${owner}; set DATABASE_URL to run several processes on one database (or remove ${file}, if that is another program)`,
    )
  }
  await writeFile(file, await nameOf(process.pid))
}

/** A process's pid and, where /proc tells, when it started: another that has its pid later is not taken for it. */
async function nameOf(pid: number): Promise<string> {
  const { started } = await statOf(pid)
  return started === undefined ? String(pid) : `${pid} ${started}`
}

/** What /proc tells of a process, if it does: its state, a letter, and when it started. */
async function statOf(pid: number): Promise<{ state: string | undefined; started: string | undefined }> {
  // Counted from behind the program's name, which may hold anything: the 3rd and the 22nd of all fields.
  const fields = (await read(`/proc/${pid}/stat`))?.split(') ').at(-1)?.split(' ')
  return { state: fields?.[0], started: fields?.[19] }
}

/** Ends a server whose owner was killed: it would hold the data directory. The first line of its lock file is its pid. */
export async function stopLeftover(databaseDir: string): Promise<void> {
  const lock = await read(resolve(databaseDir, 'postmaster.pid'))
  const pid = Number(lock?.split('\n')[0])
  if (!(await isAlive(pid)) || !(await isServer(pid, databaseDir))) return
  process.kill(pid, 'SIGINT')
  for (let waited = 0; (await isAlive(pid)) && waited < 100; waited++) await sleep(100)
}

/** Another program may have the pid by now: a server works in its data directory, and was started with that as `-D`. */
async function isServer(pid: number, databaseDir: string): Promise<boolean> {
  const folder = await readlink(`/proc/${pid}/cwd`).catch(() => null)
  if (folder !== null) return folder === (await realpath(databaseDir))
  // Where there is no /proc, as on macOS.
  const { stdout } = await promisify(execFile)('ps', ['-ww', '-o', 'args=', '-p', String(pid)]).catch(() => ({
    stdout: '',
  }))
  return stdout.includes(`postgres -D ${databaseDir} -p `)
}

/** Whether there is such a process. One that has ended is not there any more, though it may keep its pid; nor is what is no pid. */
export async function isAlive(pid: number): Promise<boolean> {
  if (!Number.isInteger(pid) || pid <= 0) return false
  try {
    process.kill(pid, 0)
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'EPERM') return false
  }
  // One that has ended keeps its pid until its parent has asked for it, which the first process of a container may never do.
  const { state = '' } = await statOf(pid)
  return !['Z', 'X'].includes(state)
}

/** Null if it cannot be read. */
export const read = (file: string): Promise<string | null> => readFile(file, 'utf8').catch(() => null)
