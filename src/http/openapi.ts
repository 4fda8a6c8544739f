import type { App } from './route.ts'

/** The OpenAPI 3.1 document of everything mounted on `app`. */
export function openApiDocument(app: App, { version, baseUrl }: { version: string; baseUrl: string }) {
  return app.getOpenAPI31Document({
    openapi: '3.1.0',
    info: {
      title: 'Waybill',
      version,
      description:
        'Webhook delivery: publish an event once, and every subscribed endpoint gets it signed, retried and accounted for.',
    },
    servers: [{ url: baseUrl }],
    tags: ['Events', 'Endpoints', 'Deliveries', 'Admin', 'Health'].map((name) => ({ name })),
  })
}
