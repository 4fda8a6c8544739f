/** The first moment of the UTC calendar month after the one of `date`: when monthly limits start anew. */
export const firstOfNextMonth = (date: Date) => new Date(Date.UTC(date.getUTCFullYear(), date.getUTCMonth() + 1, 1))
