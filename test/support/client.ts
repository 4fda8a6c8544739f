import createClient from 'openapi-fetch'
import type { paths } from './api-types.ts'
import { checkAnswer } from './validate.ts'

/** A typed client generated from the API's description, as a tenant would make it; every answer is held against it. */
export const apiClient = (service: { url: string }, key?: string) =>
  createClient<paths>({
    baseUrl: service.url,
    headers: key === undefined ? {} : { authorization: `Bearer ${key}` },
    async fetch(request) {
      const response = await fetch(request)
      const text = await response.clone().text()
      const { pathname } = new URL(request.url)
      checkAnswer(request.method, pathname, { status: response.status, headers: response.headers, text })
      return response
    },
  })
