import { execFile } from 'node:child_process'
import { chown, stat, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { promisify } from 'node:util'
import { freePort } from '../../src/embedded.ts'
import { cleanUp, type Scope } from '../../test/support/cleanup.ts'
import { connect } from '../../test/support/database.ts'
import { makeDirectory, removeDirectory } from '../../test/support/directory.ts'
import { waitFor } from '../../test/support/wait.ts'
import { type Cluster, createServer, type Server, startCluster, withSql } from './cluster.ts'
import type { Experiment } from './experiment.ts'
import { failed, goesOnAfter, isAnswered, round, slowest, triesIn } from './measure.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

type Pair = Cluster & { standby: Server }

/** A Postgres and a standby of it that confirms each commit before it counts. */
async function startPair(scope: Scope): Promise<Pair> {
  const primary = await startCluster(scope)
  await primary.stop('fast')
  const directory = await makeDirectory()
  cleanUp(scope, () => removeDirectory(directory))
  const copy = join(directory, 'postgres')
  await promisify(execFile)('cp', ['-a', primary.directory, copy])
  await writeFile(join(copy, 'standby.signal'), '')
  const { uid, gid } = await stat(primary.directory)
  await chown(join(copy, 'standby.signal'), uid, gid)
  await primary.start()
  const { username, password, port } = new URL(primary.url('postgres'))
  const upstream = `host=127.0.0.1 port=${port} user=${username} password=${password} application_name=standby`
  const standby = createServer(scope, copy, await freePort(), [`primary_conninfo=${upstream}`])
  await standby.start()
  await withSql(primary.url('postgres'), async (sql) => {
    await sql`alter system set synchronous_standby_names = 'standby'`
    await sql`select pg_reload_conf()`
    const following = () => sql`select from pg_stat_replication where sync_state = 'sync'`
    await waitFor(async () => (await following()).length === 1, { what: 'the standby to follow' })
  })
  return { ...primary, standby }
}

const failedOver: Experiment = {
  id: 'F13',
  title: 'failover to a synchronous standby',
  cluster: startPair,
  setup: { proxied: true },
  async run(world) {
    const { standby, stop } = world.cluster as Pair
    const load = world.load({ rate: 50 })
    await sleep(world.random.integer(2000, 3000))
    const asked = Date.now()
    await stop('immediate')
    world.fault(asked)
    await sleep(world.random.integer(500, 2000))
    const url = new URL(world.database.url)
    url.port = String(standby.port)
    world.database.sql = connect(url.href, 4)
    cleanUp(world.scope, () => world.database.sql.end(1000))
    await world.database.sql`select pg_promote()`
    await world.proxy.restore(standby.port)
    const back = Date.now()
    const firstSeconds = ((await goesOnAfter(world, back)).delivered - back) / 1000
    await sleep(2000)
    await load.stop()
    await world.quiesce()
    const during = triesIn(world, asked, back)
    const slowestMs = slowest(during)
    return {
      figures: {
        failed_publishes: failed(during),
        publish_max_ms: slowestMs,
        outage_s: round((back - asked) / 1000),
        first_delivery_s: round(firstSeconds),
      },
      conditions: {
        'each publish is answered within 5 s, in the error shape when it fails':
          slowestMs <= 5000 && during.every(isAnswered),
        'the first delivery comes within 5 s of the failover': firstSeconds <= 5,
      },
    }
  },
}

const notDurable: Experiment = {
  id: 'F14',
  title: 'a Postgres whose commits do not last is told of at the start',
  async run(world) {
    const warns = async () => {
      const service = await world.fleet.start('worker')
      await world.fleet.stop(service)
      const line = service.logs.find(({ msg }) => msg === 'database.not_durable')
      return line ? String(line.settings) : 'nothing'
    }
    const sound = await warns()
    await world.database.sql.text(`alter database ${world.database.name} set synchronous_commit = off`)
    const unsynced = await warns()
    await world.database.sql.text(`alter database ${world.database.name} reset synchronous_commit`)
    const lying = await withSettings(world, ['fsync=off', 'full_page_writes=off'], warns)
    await world.publish()
    return {
      figures: { synchronous_commit_off: unsynced, fsync_off: lying },
      conditions: {
        'a sound one is not complained of': sound === 'nothing',
        'synchronous_commit is named': unsynced === 'synchronous_commit',
        'fsync and full_page_writes are named': lying === 'fsync,full_page_writes',
      },
    }
  },
}

/** Restarts Postgres with settings for as long as something takes. */
async function withSettings<T>(world: World, settings: string[], run: () => Promise<T>): Promise<T> {
  const restart = async (more: string[]) => {
    await world.cluster.stop('fast')
    await world.cluster.start(more)
  }
  await restart(settings)
  try {
    return await run()
  } finally {
    await restart([])
  }
}

export const durabilityExperiments = [failedOver, notDurable]
