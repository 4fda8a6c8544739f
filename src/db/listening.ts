import { setTimeout as sleep } from 'node:timers/promises'
import { type Client, escapeIdentifier } from 'pg'

const PULSE_MS = 5000
const PAUSE_MS = 250

type Channel = { heard: (payload: string) => void; listening: () => void }

/**
 * Listens for notifications on one connection, which `connect` opens for the first channel. When it is lost, it is opened again,
 * as often as it takes. It is queried every few seconds, or it would never be noticed that it leads nowhere.
 */
export function createListening(connect: () => Promise<Client>) {
  const channels = new Map<string, Channel>()
  let connection: Promise<Client> | undefined
  let isOver = false

  async function open(): Promise<Client> {
    const client = await connect()
    client.on('notification', ({ channel, payload = '' }) => channels.get(channel)?.heard(payload))
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
        for (const { listening } of channels.values()) listening()
        return
      } catch {
        await sleep(PAUSE_MS)
      }
    }
  }

  return {
    /**
     * Resolves when it listens to `channel`; throws if it cannot. `listening` is called then, and whenever it listens again: something
     * may have been missed. Returns a function that ends it.
     */
    async listen(channel: string, heard: Channel['heard'], listening: Channel['listening']): Promise<() => void> {
      channels.set(channel, { heard, listening })
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
      listening()
      return () => channels.delete(channel)
    },
    /** Stops listening; whoever has opened the connection closes it. */
    end(): void {
      isOver = true
    },
  }
}
