import { errorTable } from '../error-answers.ts'

export const TAGS = [
  { name: 'Events', description: 'Publishing, and reading what was published.' },
  {
    name: 'Endpoints',
    description: 'Where events go: a URL, the event types it subscribes to, and the secret that signs its requests.',
  },
  {
    name: 'Deliveries',
    description:
      'One delivery per event and subscribed endpoint; each request made for it is an attempt, kept with the answer it got.',
  },
  { name: 'Metrics', description: 'What happens in a tenant, summed up.' },
  { name: 'Usage', description: 'What a tenant has used, and the limits it is held to.' },
  { name: 'Admin', description: 'For the operator, with the admin key: tenants, their API keys, retention.' },
  { name: 'Service', description: 'Health and this document; no key needed.' },
  { name: 'Webhooks', description: 'The requests that endpoints receive.' },
]

/** What holds for all routes, and every error: the description of the OpenAPI document. `prefix` is the outbound headers'. */
export const guide = (prefix: string) =>
  `
Webhook delivery: publish an event once, and every subscribed endpoint gets it signed, retried and accounted for.

## Keys
\`Authorization: Bearer <key>\`: a tenant’s API key for its own routes, the operator’s admin key for \`/v1/admin/*\`. A tenant sees its own records only; another tenant’s record answers exactly as a missing one does. Keys are for servers: there are no CORS headers.

## Requests and answers
Bodies are JSON in UTF-8, nested at most 64 deep. Unknown fields and query parameters of lists are refused, and all mistakes of a request (20 at most) are reported at once. Checks come in this order: bearer token, rate limit, request, record.

The body of a successful answer is flat: \`ok: true\` beside the record’s fields. Ids are UUIDv7; times are ISO 8601 in UTC with milliseconds. \`X-Request-Id\` is on every answer: yours, if you sent one (of at most 128 letters, digits, dots, colons, hyphens and underscores).

Lists are newest first (attempts: oldest first): \`data\`, \`limit\`, \`offset\`, \`has_more\`, \`next_cursor\`. For the next page give \`next_cursor\` as \`cursor\`, with the same filters: it continues where the page ended, whatever has arrived meanwhile, at any depth. \`offset\` ends at 10,000.

## Publishing safely
Send an \`Idempotency-Key\` with every publish. After a timeout or a 5xx, repeat the request with the same key and body:

- The same event answers 200 with the first answer and \`Idempotent-Replayed: true\`, and is not delivered twice.
- A different event answers 409. “Same” compares \`event_type\` and \`payload\` as JSON values: key order, white space and the spelling of numbers aside.

A key is kept as long as its event. A publish that a limit refuses does not use its key up. The payload’s text is stored and delivered as it was sent.

## What happened to an event
\`GET /v1/events/{event_id}/deliveries\` lists its deliveries, \`GET /v1/deliveries/{delivery_id}/attempts\` each request with its answer. Without an id, \`GET /v1/deliveries\` finds them by time, endpoint, status or type; publishing again with the same key and body answers with the event’s id.

| you see | it means |
|---|---|
| no delivery | no active endpoint had subscribed when the event was published |
| \`pending\` or \`retrying\`, \`next_attempt_at\` in the future | it waits for that moment; if its endpoint is \`inactive\` or \`failing\` then, it is held from there on |
| the same, \`next_attempt_at\` in the past | it is being attempted, or in the queue: a replay then changes something only if that attempt fails |
| the same, no \`next_attempt_at\` | it is held until its endpoint can take it: see the endpoint’s \`state\`, \`held_count\` and \`next_probe_at\`; one that is \`active\` is busy, paced, or \`ordered\` and waits for its oldest unfinished delivery |
| \`dead_lettered\` | it was given up on; \`dead_letter_reason\` says why. Replay it once the cause is mended |

## Limits
Requests are counted per tenant and action (\`events:write\`, \`endpoints:write\`, \`deliveries:replay\`, \`read\`) in fixed windows; refused ones count too. \`X-RateLimit-Limit\`, \`-Remaining\` and \`-Reset\` (seconds) say where a request stands. Monthly limits are per UTC calendar month. \`GET /v1/usage/limits\` and \`GET /v1/safety/limits\` show what holds for a tenant.

## Receiving webhooks
See *Webhooks* below for the request. Any Standard Webhooks library verifies it, by \`webhook-id\`, \`webhook-timestamp\` and \`webhook-signature\`. The same values stand in \`${prefix}-event-id\`, \`${prefix}-timestamp\` and \`${prefix}-signature\`. To verify a signature yourself, over the raw body and before parsing it:

1. The key is the base64 part of the endpoint’s \`whsec_…\` secret, decoded.
2. What is expected is \`v1,\` + base64(HMAC-SHA256(key, \`{${prefix}-event-id}.{${prefix}-timestamp}.{raw body}\`)).
3. Split \`${prefix}-signature\` at spaces, and accept if any part equals that, compared in constant time.
4. Refuse timestamps more than five minutes off.

Deliveries are made at least once, oldest first but not strictly (unless the endpoint is \`ordered\`). Deduplicate by \`${prefix}-delivery-id\`, or by \`webhook-id\` if no two endpoints lead to the same receiver. A replay carries the same ids: to process it again, forget its id first.

## What the service tells
An endpoint that names one of these types in \`subscribed_events\` (\`*\` does not include them) is told about the tenant’s other endpoints, by an event like any other:

| event type | its \`data\` |
|---|---|
| \`endpoint.disabled\` | \`endpoint_id\`, \`url\`, \`reason\` (\`gone\` or \`failing\`), \`since\` |
| \`endpoint.recovered\` | \`endpoint_id\` |
| \`delivery.dead_lettered\` | \`delivery_id\`, \`event_id\`, \`endpoint_id\`, \`event_type\`, \`dead_letter_reason\`, \`attempt_count\` |

An endpoint has recovered when it gets as many deliveries as before: after failures, and also after it was set active, or given another URL, while some were held. Not announced are dead letters that the monthly attempt limit causes, as nothing can be sent then; those of these three types; and those that are replayed before they could be told of, within a second or so.

## Errors
Every error is \`{"ok": false, "error": "…", "details": …}\`; the strings do not change, and \`details\` is absent where there is nothing to add.

${errorTable()}

After 408, 5xx or no answer, repeat with the same key and body; after 429 do what the table says; after any other error, correct the request.

A request must arrive in time (10 seconds for its headers, 10 without any more of its body, 30 in all; and its body at 64 kB a second, after half a second, if others wait for the memory that it takes) and have 1,000 headers and 16 KiB of them at most. One that does not, or is not HTTP at all, is answered with \`invalid request\` and the status 400, 408 or 431. If nothing of an answer is read for 30 seconds, its connection is closed.

## Versions
All routes but \`/health\`, \`/openapi.json\` and \`/docs\` are under \`/v1\`. New fields may be added to answers; nothing is taken away.
`.trim()
