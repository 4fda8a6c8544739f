import { createRoute, z } from '@hono/zod-openapi'
import type { Pool } from '../db/open.ts'
import type { Log } from '../log.ts'
import { runRetention } from '../upkeep/retention.ts'
import { startDeadline } from './deadline.ts'
import { ADMIN_ERRORS, BODY_ERRORS, errorAnswers } from './error-answers.ts'
import type { Mount } from './route.ts'
import { answers, count, jsonBody, ok, timestamp } from './schemas.ts'

const runNow = createRoute({
  method: 'post',
  path: '/v1/admin/retention/run',
  operationId: 'runRetention',
  tags: ['Admin'],
  summary: 'Delete what is older than the retention period',
  description: 'It also runs on a schedule. What an unfinished delivery needs is kept however old it is.',
  request: {
    body: jsonBody(
      z.strictObject({
        apply: z.boolean().openapi({ description: 'False counts what would be deleted; true deletes it.' }),
      }),
    ),
  },
  responses: {
    200: answers(
      'How many rows were, or would be, deleted',
      z
        .object({
          ok,
          applied: z.boolean(),
          cutoff: timestamp.openapi({
            description: 'What was created before this is deleted: a midnight UTC.',
            example: '2026-10-21T00:00:00.000Z',
          }),
          events: count,
          deliveries: count,
          attempts: count,
          idempotency_keys: count,
        })
        .openapi('RetentionRun'),
    ),
    ...errorAnswers(...ADMIN_ERRORS, ...BODY_ERRORS),
  },
})

/** Retention on demand; workers run the same on a schedule. `retention` is a pool whose statements may take long. */
export function mountRetention(
  mount: Mount,
  deps: { pool: Pool; retention: Pool; retentionDays: number; log: Log },
): void {
  const { pool, retention, retentionDays: days, log } = deps
  mount.admin(
    runNow,
    async (c, { body }) => {
      // Asked first, to report in time that the database is away: the retention pool would wait for an hour.
      await startDeadline()(() => pool`select 1`)
      return c.json({ ok: true, ...(await runRetention(retention, { days, apply: body.apply, log })) }, 200)
    },
    { takesLong: true },
  )
}
