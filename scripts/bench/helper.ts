import { type ChildProcess, fork } from 'node:child_process'
import type { Behaviour, Crowd } from './crowd.ts'
import type { Load, LoadResult } from './load.ts'
import type { Posting } from './post.ts'
import type { Received } from './receiver.ts'

/** What each helper process does when asked; a module that is forked answers these by `serve`. */
export type Tasks = {
  receiver: {
    /** The same behind both; the second speaks TLS. */
    listen: (task: null) => { port: number; securePort: number }
    /** Forgets what came, and resolves once `count` different deliveries have come or `seconds` are over. */
    expect: (task: { count: number; seconds: number }) => Received
    /** Different deliveries since the last `expect`. */
    count: (task: null) => number
  }
  load: { run: (task: Load) => LoadResult }
  crowd: {
    /** The port of a new receiver. */
    listen: (behaviour: Behaviour) => number
    /** Changes one, and forgets what it has seen. */
    behave: (task: { port: number; behaviour: Behaviour }) => null
    look: (port: number) => Crowd | null
  }
  post: { run: (task: Posting) => { posts: number; seconds: number } }
}

export type Helper<Name extends keyof Tasks> = {
  pid: number
  ask: <Task extends keyof Tasks[Name]>(task: Task, argument: Argument<Name, Task>) => Promise<Answer<Name, Task>>
  stop: () => void
}

type Argument<N extends keyof Tasks, T extends keyof Tasks[N]> = Tasks[N][T] extends (task: infer A) => unknown
  ? A
  : never
type Answer<N extends keyof Tasks, T extends keyof Tasks[N]> = Tasks[N][T] extends (task: never) => infer A ? A : never

/** Runs the module `name` of this folder as a process of its own, so that its work is not done on the time of what is measured. */
export function startHelper<Name extends keyof Tasks>(name: Name): Helper<Name> {
  const child: ChildProcess = fork(new URL(`./${name}.ts`, import.meta.url), { serialization: 'advanced' })
  const waiting = new Map<number, PromiseWithResolvers<unknown>>()
  let asked = 0
  child.on('message', ({ id, answer, error }: { id: number; answer?: unknown; error?: string }) => {
    if (error === undefined) waiting.get(id)?.resolve(answer)
    else waiting.get(id)?.reject(new Error(error))
    waiting.delete(id)
  })
  child.on('exit', () => {
    for (const promise of waiting.values()) promise.reject(new Error(`the ${name} process ended`))
  })
  return {
    pid: child.pid ?? 0,
    ask: (task, argument) => {
      const id = ++asked
      const answer = Promise.withResolvers<unknown>()
      // If a part fails, nobody waits any more for what it has asked for, and the bench still has to clean up.
      answer.promise.catch(() => {})
      waiting.set(id, answer)
      child.send({ id, task, argument })
      return answer.promise as Promise<never>
    },
    stop: () => void child.kill('SIGKILL'),
  }
}
