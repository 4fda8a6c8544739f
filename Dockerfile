# Two stages: the first compiles, the second carries only what runs.
FROM node:24-slim AS build
WORKDIR /app
COPY package.json package-lock.json tsconfig.json ./
RUN npm ci
COPY src src
RUN npm run build

FROM node:24-slim
WORKDIR /app
# With one malloc arena per thread memory fragments, and grows by the hour.
ENV NODE_ENV=production MALLOC_ARENA_MAX=2
COPY package.json package-lock.json ./
RUN npm ci --omit=dev && npm cache clean --force
COPY sql sql
COPY --from=build /app/dist dist
USER node
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
  CMD ["node", "-e", "require('http').get({ host: process.env.HOST || '127.0.0.1', port: process.env.PORT || 8080, path: '/health', agent: false }, (r) => process.exit(r.statusCode === 200 ? 0 : 1)).on('error', () => process.exit(1))"]
# Young objects die young here, in a space that is large from the start; what survives is collected before there is much of it.
ENTRYPOINT ["node", "--no-allocation-site-pretenuring", "--min-semi-space-size=32", "--max-semi-space-size=32", "--initial-old-space-size=48", "--heap-growing-percent=60", "dist/main.js"]
