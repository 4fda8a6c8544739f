import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { test } from 'node:test'
import { cacheKeys, createSecretBox, hashApiKey, makeApiKey, makeSigningSecret } from '../src/secrets.ts'

const OWNER = 'tenant/endpoint'

test('what was sealed opens again, and is not readable in between', () => {
  const box = createSecretBox([randomBytes(32)])
  const secret = makeSigningSecret()
  const sealed = box.seal(secret, OWNER)
  assert.equal(box.open(sealed, OWNER), secret)
  assert.ok(!sealed.includes(secret) && !sealed.includes(secret.slice(6)))
})

test('sealing twice gives different bytes', () => {
  const box = createSecretBox([randomBytes(32)])
  assert.notDeepEqual(box.seal('whsec_a', OWNER), box.seal('whsec_a', OWNER))
})

test('a sealed secret that was moved to another owner does not open', () => {
  const box = createSecretBox([randomBytes(32)])
  assert.throws(() => box.open(box.seal('whsec_a', OWNER), 'tenant/other'))
})

test('nor does it after it was opened where it belongs, which is remembered', () => {
  const box = createSecretBox([randomBytes(32)])
  let count = 0
  const keyOf = cacheKeys({
    ...box,
    open(...asked) {
      count++
      return box.open(...asked)
    },
  })
  const sealed = box.seal('whsec_c2VjcmV0', OWNER).toString('hex')
  assert.equal(keyOf(sealed, OWNER).export().toString(), 'secret')
  assert.equal(keyOf(sealed, OWNER), keyOf(sealed, OWNER))
  assert.equal(count, 1)
  assert.throws(() => keyOf(sealed, 'tenant/other'))
})

test('a sealed secret of which any byte was changed does not open', () => {
  const box = createSecretBox([randomBytes(32)])
  const sealed = box.seal('whsec_a', OWNER)
  for (let at = 0; at < sealed.length; at++) {
    const changed = Buffer.from(sealed)
    changed[at]! ^= 1
    assert.throws(() => box.open(changed, OWNER), `byte ${at}`)
  }
})

test('a sealed secret that was cut short does not open', () => {
  const box = createSecretBox([randomBytes(32)])
  const sealed = box.seal('whsec_a', OWNER)
  for (let length = 0; length < sealed.length; length++) {
    assert.throws(() => box.open(sealed.subarray(0, length), OWNER), `${length} bytes`)
  }
})

test('the first key seals, every key opens, and an unknown one is named', () => {
  const [older, newer] = [randomBytes(32), randomBytes(32)]
  const before = createSecretBox([older])
  const rotated = createSecretBox([newer, older])
  assert.equal(rotated.open(before.seal('whsec_a', OWNER), OWNER), 'whsec_a')
  const sealed = rotated.seal('whsec_b', OWNER)
  assert.equal(createSecretBox([newer]).open(sealed, OWNER), 'whsec_b')
  assert.throws(() => before.open(sealed, OWNER), new RegExp(`no encryption key with id ${rotated.keyIds[0]}`))
})

test('without a key there is no box', () => {
  assert.throws(() => createSecretBox([]), /no encryption key/)
})

test('a signing secret is whsec_ and 32 bytes in base64, an API key wb_live_ and 43 characters', () => {
  assert.match(makeSigningSecret(), /^whsec_[A-Za-z0-9+/]{43}=$/)
  assert.equal(Buffer.from(makeSigningSecret().slice(6), 'base64').length, 32)
  assert.match(makeApiKey(), /^wb_live_[A-Za-z0-9_-]{43}$/)
  assert.notEqual(makeApiKey(), makeApiKey())
})

test('an API key is stored as its SHA-256', () => {
  const abc = 'ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad'
  assert.equal(hashApiKey('abc').toString('hex'), abc)
})
