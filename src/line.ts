/** Where one stands in a line. */
export type Place<T> = { readonly value: T; isTaken: boolean; before: Place<T> | null; after: Place<T> | null }

/**
 * Values in the order in which they came, for what comes and goes by the thousand each second, and may go from anywhere.
 *
 * V8's Map, Set and WeakMap make a new table every few hundred of them then. One that is left behind after it has been moved to
 * the old space keeps what it held, and of Map and Set all the tables that follow it, until the next full collection:
 * with a Set of the requests under way, that took a fifth of the API's time. Here who has left holds nobody.
 */
export class Line<T> implements Iterable<T> {
  #first: Place<T> | null = null
  #last: Place<T> | null = null
  #size = 0

  get size(): number {
    return this.#size
  }

  /** At the end; the place is for `leave`. */
  join(value: T): Place<T> {
    const place = { value, isTaken: true, before: this.#last, after: null }
    if (this.#last) this.#last.after = place
    else this.#first = place
    this.#last = place
    this.#size++
    return place
  }

  /** Said again, it means nothing. */
  leave(place: Place<T>): void {
    if (!place.isTaken) return
    place.isTaken = false
    if (place.before) place.before.after = place.after
    else this.#first = place.after
    if (place.after) place.after.before = place.before
    else this.#last = place.before
    place.before = place.after = null
    this.#size--
  }

  /** Who leaves while it is gone through must be copied first. */
  *[Symbol.iterator](): Generator<T> {
    for (let place = this.#first; place; place = place.after) yield place.value
  }
}
