import { readFile } from 'node:fs/promises'
import { createRequire } from 'node:module'
import { promisify } from 'node:util'
import { gzip } from 'node:zlib'
import { createRoute, z } from '@hono/zod-openapi'
import { AppError } from '../../errors.ts'
import type { App, Mount } from '../route.ts'
import { type DocumentOptions, openApiDocument } from './openapi.ts'

/** Everything comes from this service: scripts and styles from its own files, no inline script, nothing from elsewhere. */
const PAGE_POLICY = [
  "default-src 'none'",
  "script-src 'self'",
  "style-src 'self'",
  "img-src 'self' data:",
  "connect-src 'self'",
  "base-uri 'none'",
  "form-action 'none'",
  "frame-ancestors 'none'",
].join('; ')

const require = createRequire(import.meta.url)
const { version } = require('swagger-ui-dist/package.json') as { version: string }
/** The library's version is in the path, so its files can be kept for good. */
const ASSETS = `docs/${version}`
const FOR_GOOD = 'public, max-age=31536000, immutable'

const PAGE = `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Waybill API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="${ASSETS}/swagger-ui.css">
<div id="reference">A script makes this page from <a href="openapi.json">openapi.json</a>, and has not done so yet.</div>
<script src="${ASSETS}/swagger-ui-bundle.js"></script>
<script type="module" src="docs/start.js"></script>
</html>
`

/** Requests that are tried out go to where the page came from, whatever address the document names. */
const START = `const description = await (await fetch('openapi.json')).json()
description.servers = [{ url: new URL('.', document.baseURI).href.replace(/\\/$/, '') }]
SwaggerUIBundle({ spec: description, dom_id: '#reference', deepLinking: true, defaultModelsExpandDepth: 0 })
`

const FILES = new Map([
  ['swagger-ui.css', 'text/css; charset=utf-8'],
  ['swagger-ui-bundle.js', 'text/javascript; charset=utf-8'],
])

const getDocument = createRoute({
  method: 'get',
  path: '/openapi.json',
  operationId: 'getOpenApiDocument',
  tags: ['Service'],
  summary: 'This document',
  description: 'Generated from the routes themselves.',
  responses: {
    200: {
      description: 'OpenAPI 3.1',
      content: {
        'application/json': { schema: z.record(z.string(), z.unknown()).openapi({ example: { openapi: '3.1.0' } }) },
      },
    },
  },
})

const getReference = createRoute({
  method: 'get',
  path: '/docs',
  operationId: 'getReference',
  tags: ['Service'],
  summary: 'This document as a page',
  description: 'Requests can be tried out from it. Its scripts and styles come from this service.',
  responses: {
    200: { description: 'A page that loads nothing from elsewhere', content: { 'text/html': { schema: z.string() } } },
  },
})

/** `/openapi.json` and the reference page `/docs`, both whole without internet access. */
export function mountDocs(mount: Mount, app: App, options: DocumentOptions): void {
  // As bytes, one copy serves every connection, even those whose clients do not read.
  let document: Buffer<ArrayBuffer> | undefined
  mount.open(getDocument, (c) => {
    document ??= Buffer.from(JSON.stringify(openApiDocument(app, options)))
    c.header('cache-control', 'no-cache')
    return c.body(document, 200, { 'content-type': 'application/json' })
  })

  mount.open(getReference, (c) => {
    c.header('content-security-policy', PAGE_POLICY)
    c.header('cache-control', 'no-cache')
    return c.html(PAGE)
  })

  app.get('/docs/start.js', (c) => {
    c.header('cache-control', 'no-cache')
    return c.body(START, 200, { 'content-type': 'text/javascript; charset=utf-8' })
  })

  const zipped = new Map<string, Promise<Buffer<ArrayBuffer>>>()
  app.get(`/${ASSETS}/:file`, async (c) => {
    const name = c.req.param('file')
    const type = FILES.get(name)
    if (type === undefined) throw new AppError('not_found')
    // However many ask for it at once, it is read and zipped once.
    const file = zipped.get(name) ?? readFile(require.resolve(`swagger-ui-dist/${name}`)).then(promisify(gzip))
    zipped.set(name, file)
    file.catch(() => zipped.delete(name))
    c.header('cache-control', FOR_GOOD)
    // These files are for browsers, and every browser reads gzip.
    return c.body(await file, 200, { 'content-type': type, 'content-encoding': 'gzip' })
  })
}
