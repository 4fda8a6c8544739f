export type Client = <Answer>(method: string, path: string, body?: object, headers?: object) => Promise<Answer>

/** The service's API with one bearer key. Throws with the service's own words when it refuses. */
export function createClient(url: string, key: string): Client {
  return async (method, path, body, headers) => {
    const response = await fetch(url + path, {
      method,
      headers: { authorization: `Bearer ${key}`, 'content-type': 'application/json', ...headers },
      ...(body && { body: JSON.stringify(body) }),
      signal: AbortSignal.timeout(15_000),
    })
    const answer = (await response.json()) as { error?: string; details?: unknown }
    if (!response.ok) {
      const details = answer.details === undefined ? '' : ` ${JSON.stringify(answer.details)}`
      throw new Error(`${method} ${path} answered ${response.status}: ${answer.error}${details}`)
    }
    return answer as never
  }
}
