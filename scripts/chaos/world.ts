import { cleanUp, type Scope } from '../../test/support/cleanup.ts'
import { settled } from '../../test/support/deliveries.ts'
import { type Proxy as DatabaseProxy, startProxy } from '../../test/support/proxy.ts'
import { type Call, caller, createTenant } from '../../test/support/service.ts'
import type { Cluster, Database } from './cluster.ts'
import { createFleet, type Fleet } from './fleet.ts'
import { type Endpoint, type Ledger, startLedger } from './ledger.ts'
import { createPublisher, type Load, newPublish, type Publish, startLoad } from './publisher.ts'
import { createRandom, type Random } from './random.ts'

/** What an experiment starts with; what is left out is one API, one worker, and no proxy. */
export type Setup = {
  apis?: number
  workers?: number
  env?: Record<string, string>
  /** Node's, beyond those that the program is shipped with. */
  flags?: string[]
  /** Lets the services reach the database only through `world.proxy`. */
  proxied?: boolean
}

type Tenant = { tenantId: string; key: string }

const TYPES = ['order.paid', 'order.sent']

/** What differs from the service's defaults, so that only the experiment's own faults stand in the way. */
const ENV = {
  RATE_LIMIT_EVENTS_WRITE: '0',
  RATE_LIMIT_ENDPOINTS_WRITE: '0',
  RATE_LIMIT_DELIVERIES_REPLAY: '0',
  RATE_LIMIT_READ: '0',
  ATTEMPT_TIMEOUT_SECONDS: '15',
}

/**
 * Everything of one run: a database of its own, the real program in processes, two tenants, and receivers. `tenant` has
 * three active endpoints (two get every type of TYPES, one `order.paid` only) and an inactive one; a stranger has one for
 * everything and publishes nothing, so nothing may arrive there.
 */
export type World = {
  /** Whether a short run was asked for. */
  quick: boolean
  random: Random
  /** What is registered here (`cleanUp`) is undone after the run. */
  scope: Scope
  cluster: Cluster
  database: Database
  /** Between the services and the database; only with `proxied`. */
  proxy: DatabaseProxy
  fleet: Fleet
  tenant: Tenant
  tenants: Tenant[]
  /** One more tenant, with a key. */
  addTenant: () => Promise<Tenant>
  /** Calls an API that runs, as `tenant` unless another key is given. */
  call: Call
  ledger: Ledger
  endpoints: Endpoint[]
  /** Those of `tenant` that are active from the start. */
  active: Endpoint[]
  /** Registers one more endpoint, for all types of `tenant` unless others are given. */
  addEndpoint: (
    path: string,
    options?: { types?: string[]; tenant?: Tenant; reply?: Endpoint['reply'] },
  ) => Promise<Endpoint>
  /** Begins to publish; `quiesce` stops it when it has not been stopped before. */
  load: (options: { rate: number; types?: string[]; tenant?: Tenant }) => Load
  /** Publishes one event, as a load does; resolves when it is accepted or refused. */
  publish: (options?: { type?: string; payload?: string; key?: string; tenant?: Tenant }) => Promise<Publish>
  /** All that was to be published; who publishes by other ways adds it here (`newPublish`). */
  published: Publish[]
  /**
   * A fault was made between two moments (milliseconds since 1970; the second is now when it is left out). What had been
   * sent by then and was not recorded yet was in flight: it may arrive twice, and be miscounted.
   */
  fault: (from: number, to?: number) => void
  faults: { from: number; to: number }[]
  /** So many more deliveries may be in flight at faults. */
  allowed: number
  /** Deliveries that were replayed, and how many times more they may arrive for that. */
  replays: Map<string, number>
  /** Whether an accepted event goes to an endpoint, by what that is subscribed to; experiments that change this say so here. */
  isDue: (publish: Publish, endpoint: Endpoint) => boolean
  /** Ends all loads, and waits until nothing is left to deliver. */
  quiesce: (timeoutMs?: number) => Promise<void>
}

export async function createWorld(
  scope: Scope,
  cluster: Cluster,
  { seed, quick, setup }: { seed: number; quick: boolean; setup: Setup },
): Promise<World> {
  const [database, ledger] = await Promise.all([cluster.createDatabase(scope), startLedger(scope)])
  const proxy = setup.proxied ? await startProxy(scope, database.url) : undefined
  const fleet = createFleet(scope, proxy?.url ?? database.url, {
    env: { ...ENV, ...setup.env },
    flags: setup.flags,
  })
  const many = (count: number, mode: 'api' | 'worker') => Array.from({ length: count }, () => fleet.start(mode))
  const [first] = await Promise.all([...many(setup.apis ?? 1, 'api'), ...many(setup.workers ?? 1, 'worker')])
  if (first === undefined) throw new Error('a world needs an API')
  const publisher = createPublisher(fleet.addresses)
  cleanUp(scope, publisher.close)

  const tenants: Tenant[] = []
  const addTenant = async () => {
    const { tenantId, key } = await createTenant({ url: fleet.urls()[0] ?? '' })
    tenants.push({ tenantId, key })
    return { tenantId, key }
  }
  const tenant = await addTenant()
  const stranger = await addTenant()
  const call: Call = (method, path, options) => caller(fleet.urls()[0] ?? '', tenant.key)(method, path, options)

  const endpoints: Endpoint[] = []
  const addEndpoint: World['addEndpoint'] = async (path, { types = ['*'], tenant: owner = tenant, reply } = {}) => {
    const url = ledger.url(path)
    const made = await call('POST', '/v1/endpoints', { key: owner.key, body: { url, subscribed_events: types } })
    if (made.status !== 201) throw new Error(`no endpoint was made: ${made.text}`)
    const endpoint: Endpoint = {
      endpointId: made.body.endpoint_id,
      tenantId: owner.tenantId,
      url,
      types,
      active: true,
      secrets: [made.body.signing_secret],
      reply: reply ?? (() => 200),
    }
    endpoints.push(endpoint)
    ledger.attach(endpoint)
    return endpoint
  }
  const active = [
    await addEndpoint('/all'),
    await addEndpoint('/both', { types: TYPES }),
    await addEndpoint('/paid', { types: ['order.paid'] }),
  ]
  const inactive = await addEndpoint('/inactive')
  await call('PATCH', `/v1/endpoints/${inactive.endpointId}`, { body: { is_active: false } })
  inactive.active = false
  await addEndpoint('/foreign', { tenant: stranger })

  const loads: Load[] = []
  const published: Publish[] = []
  let singles = 0
  const faults: World['faults'] = []
  return {
    quick,
    random: createRandom(seed),
    scope,
    cluster,
    database,
    proxy: proxy as DatabaseProxy,
    fleet,
    tenant,
    tenants,
    addTenant,
    call,
    ledger,
    endpoints,
    active,
    addEndpoint,
    load({ rate, types = TYPES, tenant: owner = tenant }) {
      const load = startLoad({
        publisher,
        tenant: owner,
        rate,
        types,
        random: createRandom(seed * 1000 + loads.length),
        name: `load-${loads.length}`,
        onPublish: (entry) => published.push(entry),
      })
      loads.push(load)
      return load
    },
    async publish({
      type = 'order.paid',
      key = `single-${++singles}`,
      payload = `{"key":"${key}"}`,
      tenant: owner = tenant,
    } = {}) {
      const entry = newPublish({ tenantId: owner.tenantId, key, type, payload })
      published.push(entry)
      await publisher.publish(entry, owner.key)
      return entry
    },
    published,
    fault: (from, to = Date.now()) => void faults.push({ from, to }),
    faults,
    allowed: 0,
    replays: new Map(),
    isDue: (publish, endpoint) =>
      endpoint.active &&
      endpoint.tenantId === publish.tenantId &&
      (endpoint.types.includes('*') || endpoint.types.includes(publish.type)),
    async quiesce(timeoutMs = 120_000) {
      await Promise.all(loads.map((load) => load.stop()))
      await settled(database.sql, timeoutMs)
    },
  }
}
