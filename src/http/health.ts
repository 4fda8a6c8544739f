import { createRoute, z } from '@hono/zod-openapi'
import { MODES, type Mode } from '../config.ts'
import { isFull } from '../db/errors.ts'
import type { Pool } from '../db/open.ts'
import { setLate } from '../pacing.ts'
import { VERSION } from '../version.ts'
import type { Mount } from './route.ts'
import { answers, ok } from './schemas.ts'

/** A database that does not answer in this time is reported as unreachable. */
export const HEALTH_PATIENCE_MS = 750

const about = {
  version: z.string().openapi({ example: '1.2.3' }),
  mode: z.enum(MODES),
}

const health = createRoute({
  method: 'get',
  path: '/health',
  operationId: 'getHealth',
  tags: ['Service'],
  summary: 'Whether the service and its database answer',
  description:
    'Reports on the process that answers, in every mode, within a second whatever the database does. It uses a connection of its own, so that load alone never makes it 503.',
  responses: {
    200: answers('Both answer', z.object({ ok, status: z.literal('ok'), database: z.literal('ok'), ...about })),
    503: answers(
      'The database does not answer',
      z.object({
        ok: ok.openapi({ example: false }),
        status: z.literal('unavailable'),
        database: z.literal('unreachable'),
        ...about,
      }),
    ),
  },
})

/** Health of this process and its database, answered within a second whatever the database does. `pulse` serves nothing else. */
export function mountHealth(mount: Mount, { pulse, pool, mode }: { pulse: Pool; pool: Pool; mode: Mode }): void {
  const answersInTime = createQuestion(pulse, pool)
  mount.open(health, async (c) => {
    const answered = await answersInTime()
    const body = {
      ok: answered,
      status: answered ? 'ok' : 'unavailable',
      database: answered ? 'ok' : 'unreachable',
      version: VERSION,
      mode,
    }
    return c.json(body, answered ? 200 : 503)
  })
}

/** Whether the database answers in time. Whoever asks while a question is under way shares its answer. */
function createQuestion(pulse: Pool, pool: Pool): () => Promise<boolean> {
  let asked: Promise<boolean> | null = null

  const ask = () =>
    pulse`select 1`
      .catch((error: unknown) => {
        // The server has no connection left for this; those that it has given us may do all the same.
        if (!isFull(error)) throw error
        return pool`select 1`
      })
      .then(
        () => true,
        () => false,
      )
      .finally(() => {
        asked = null
      })

  return async () => {
    const { promise: late, resolve } = Promise.withResolvers<boolean>()
    const timer = setLate(() => resolve(false), HEALTH_PATIENCE_MS)
    asked ??= ask()
    return await Promise.race([asked, late]).finally(() => clearTimeout(timer))
  }
}
