import { setTimeout as sleep } from 'node:timers/promises'
import { type Client, escapeIdentifier } from 'pg'

const PULSE_MS = 5000
const PAUSE_MS = 250

/** `payload` is null where something may have been missed. */
type Heard = (payload: string | null) => void

/**
 * Listens for notifications on one connection, which `connect` opens for the first channel. When it is lost, it is opened again,
 * as often as it takes. It is queried every few seconds, or it would never be noticed that it leads nowhere.
 */
export function createListening(connect: () => Promise<Client>) {
  const channels = new Map<string, Heard>()
  let connection: Promise<Client> | undefined
  let isOver = false

  async function open(): Promise<Client> {
    const client = await connect()
    client.on('notification', ({ channel, payload = '' }) => channels.get(channel)?.(payload))
    const pulse = setInterval(() => client.query('select 1').catch(() => client.connection.stream.destroy()), PULSE_MS)
    client.once('end', () => clearInterval(pulse))
    const lost = new Promise((resolve) => client.once('end', resolve))
    try {
      for (const name of channels.keys()) await client.query(`listen ${escapeIdentifier(name)}`)
    } catch (error) {
      client.connection.stream.destroy()
      throw error
    }
    void lost.then(openAgain)
    return client
  }

  async function openAgain(): Promise<void> {
    while (!isOver) {
      try {
        connection = open()
        await connection
        for (const heard of channels.values()) heard(null)
        return
      } catch {
        await sleep(PAUSE_MS)
      }
    }
  }

  return {
    /** Resolves when it listens to `channel`; throws if it cannot. Then, and whenever it listens again, it has `heard` null. */
    async listen(channel: string, heard: Heard): Promise<void> {
      channels.set(channel, heard)
      const opened = connection
      connection ??= open()
      try {
        const client = await connection
        if (opened !== undefined) await client.query(`listen ${escapeIdentifier(channel)}`)
      } catch (error) {
        channels.delete(channel)
        // A connection that serves other channels, too, is opened again if need be.
        if (opened === undefined) connection = undefined
        throw error
      }
      heard(null)
    },
    /** Stops listening; whoever has opened the connection closes it. */
    end(): void {
      isOver = true
    },
  }
}
