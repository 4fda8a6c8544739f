import { styleText } from 'node:util'
import type { Observation } from './observations.ts'

type Colour = Parameters<typeof styleText>[0]

const COLOURS: Record<string, Colour> = {
  published: 'cyan',
  verified: 'green',
  delivered: 'green',
  retry: 'yellow',
  'dead letter': 'red',
  refused: 'red',
  failed: 'red',
  mended: 'magenta',
  replayed: 'magenta',
}

const inColour = Boolean(process.stdout.isTTY) && !process.env.NO_COLOR
const paint = (colour: Colour, text: string) => (inColour ? styleText(colour, text, { validateStream: false }) : text)

/** The account in the terminal: one line a step, in columns, with the seconds since the start. */
export function createAccount() {
  const started = performance.now()
  /** What the log calls by id, by the names that the story gave. */
  const names = new Map<string, string>()

  function line(step: string, subject: string, endpoint: string, text: string): void {
    const seconds = ((performance.now() - started) / 1000).toFixed(3)
    const columns = [
      paint('dim', seconds.padStart(8)),
      paint(COLOURS[step] ?? 'bold', step.padEnd(12)),
      subject.padEnd(15),
      endpoint.padEnd(9),
      text,
    ]
    process.stdout.write(`${columns.join('  ').trimEnd()}\n`)
  }

  const name = (id: unknown) => names.get(String(id)) ?? String(id ?? '')

  /** Tells what was seen, where it belongs to the story. */
  function tell(seen: Observation): void {
    switch (seen.msg) {
      case 'event.received':
        names.set(String(seen.event_id), String(seen.event_type))
        if (seen.replayed)
          line('repeated', name(seen.event_id), '', 'same Idempotency-Key: the same event, sent only once')
        else line('published', name(seen.event_id), '', `event ${seen.event_id}, deliveries: ${seen.delivery_count}`)
        break
      case 'receiver.verified':
        line('verified', String(seen.event_type), String(seen.endpoint), `signature is good; answering ${seen.status}`)
        break
      case 'receiver.refused':
        line('refused', name(seen.event_id), String(seen.endpoint), `signature is not good: ${seen.problem}`)
        break
      case 'delivery.attempted':
        tellAttempt(seen)
        break
      case 'delivery.dead_lettered':
        line(
          'dead letter',
          name(seen.event_id),
          name(seen.endpoint_id),
          `given up after attempt ${seen.attempt_count}: ${String(seen.dead_letter_reason).replaceAll('_', ' ')}`,
        )
    }
  }

  function tellAttempt(seen: Observation): void {
    const wait = seen.next_attempt_at ? (Date.parse(String(seen.next_attempt_at)) - Date.now()) / 1000 : null
    const result = `attempt ${seen.attempt_number}: ${seen.status_code ?? seen.error} in ${seen.duration_ms} ms`
    const [step, text] = !seen.error
      ? ['delivered', result]
      : wait === null
        ? ['failed', `${result}, no retry left`]
        : ['retry', `${result}, next in ${Math.max(wait, 0).toFixed(1)} s`]
    line(step as string, name(seen.event_id), name(seen.endpoint_id), text as string)
  }

  return {
    line,
    tell,
    name: (id: string, called: string) => void names.set(id, called),
    heading: (text: string) => void process.stdout.write(`\n${paint('bold', text)}\n`),
    text: (text: string) => void process.stdout.write(`${text}\n`),
  }
}

export type Account = ReturnType<typeof createAccount>
