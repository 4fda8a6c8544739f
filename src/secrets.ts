import { createCipheriv, createDecipheriv, createSecretKey, hash, type KeyObject, randomBytes } from 'node:crypto'
import { LRUCache } from 'lru-cache'

const KEY_ID_BYTES = 4
const IV_BYTES = 12
const TAG_BYTES = 16

/** A secret was encrypted with a key that this process does not have. */
export class MissingKey extends Error {}

export type SecretBox = {
  /** Encrypts with the first key. `owner` binds the result to its row: moved to another, it does not decrypt. */
  seal(secret: string, owner: string): Buffer
  /** Throws `MissingKey` if no key fits, and another error if the bytes are not what was sealed for `owner`. */
  open(sealed: Buffer, owner: string): string
  /** Ids (hex) of the keys of this process. What `seal` returns begins with the id of the key that it needs. */
  keyIds: string[]
}

/**
 * Signing secrets at rest: AES-256-GCM, laid out as key id (4 bytes) | iv (12) | ciphertext | tag (16). The key id is
 * the start of the key's SHA-256, so keys can be rotated: the first one encrypts, all of them decrypt.
 */
export function createSecretBox(keys: Buffer[]): SecretBox {
  // A key that is given as bytes takes OpenSSL three times as long to set up as all else that is done with it here.
  const byId = new Map(
    keys.map((key) => [hash('sha256', key, 'buffer').subarray(0, KEY_ID_BYTES).toString('hex'), createSecretKey(key)]),
  )
  const [current] = byId
  if (current === undefined) throw new Error('no encryption key')
  return {
    keyIds: [...byId.keys()],
    seal(secret, owner) {
      const iv = randomBytes(IV_BYTES)
      const cipher = createCipheriv('aes-256-gcm', current[1], iv).setAAD(Buffer.from(owner))
      const text = Buffer.concat([cipher.update(secret, 'utf8'), cipher.final()])
      return Buffer.concat([Buffer.from(current[0], 'hex'), iv, text, cipher.getAuthTag()])
    },
    open(sealed, owner) {
      const keyId = sealed.subarray(0, KEY_ID_BYTES).toString('hex')
      const key = byId.get(keyId)
      if (key === undefined) throw new MissingKey(`no encryption key with id ${keyId}`)
      const iv = sealed.subarray(KEY_ID_BYTES, KEY_ID_BYTES + IV_BYTES)
      const decipher = createDecipheriv('aes-256-gcm', key, iv, { authTagLength: TAG_BYTES })
      decipher.setAAD(Buffer.from(owner)).setAuthTag(sealed.subarray(-TAG_BYTES))
      return (
        decipher.update(sealed.subarray(KEY_ID_BYTES + IV_BYTES, -TAG_BYTES), undefined, 'utf8') +
        decipher.final('utf8')
      )
    },
  }
}

/** What an endpoint's signing secrets are sealed for: its row. */
export const ownerOf = (tenantId: string, endpointId: string) => `${tenantId}/${endpointId}`

/** The key in a signing secret: its base64 part, decoded (Standard Webhooks). */
export const signingKey = (secret: string): KeyObject =>
  createSecretKey(Buffer.from(secret.replace(/^whsec_/, ''), 'base64'))

/**
 * Opens sealed signing secrets, given in hexadecimal, and remembers their keys: opening one, as well as setting its key up, takes longer
 * than signing with it.
 */
export function cacheKeys(box: SecretBox): (sealed: string, owner: string) => KeyObject {
  const keys = new LRUCache<string, KeyObject, { sealed: string; owner: string }>({
    max: 10_000,
    memoMethod: (_key, _stale, { context: { sealed, owner } }) =>
      signingKey(box.open(Buffer.from(sealed, 'hex'), owner)),
  })
  return (sealed, owner) => keys.memo(`${owner} ${sealed}`, { context: { sealed, owner } })
}

/** A new signing secret: `whsec_` and 32 random bytes in base64 (Standard Webhooks). */
export const makeSigningSecret = () => `whsec_${randomBytes(32).toString('base64')}`

/** A new tenant API key: `wb_live_` and 43 base64url characters, 256 random bits. */
export const makeApiKey = () => `wb_live_${randomBytes(32).toString('base64url')}`

/** The form in which API keys are stored and looked up. */
export const hashApiKey = (key: string): Buffer => hash('sha256', key, 'buffer')
