"""Keys and Lua of the Redis store; life times come from `StoreLimits`, layouts from `packing.py`.

Every key of a user and its outbox stream carries one hash tag, `{bNNN}`, so that a script touches one slot of
a cluster. Scripts need Redis ≥ 7.0 or Valkey and use nothing but plain commands and Lua's `struct`.
Timestamps are compared as numbers, never as strings: Lua compares strings by the server's locale.
"""

import binascii
import re
from hashlib import sha1
from typing import Final, NamedTuple

from service.states.interface import Subject

NUM_BUCKETS = 256

UNKNOWN_KEY = "bft:1:unknown"
"""Hash of ids outside the catalogue, both ways: `i<id>` → number, `n<number>` → id."""
ITEMS_KEY = "bft:1:items"
"""Hash of the items added at run time: `i<id>` → its metadata, a JSON object; `v` → the version of them all."""
MODELS_KEY = "bft:1:models"
"""Sorted set of the model versions that may have states, by the time of their registration in ms."""
MAX_MODELS = 256
"""Versions kept in MODELS_KEY, the newest ones; the states of older ones have long expired."""

SLATE_KEYS = f"bft:1:{{b[0-9][0-9][0-9]}}:r:b[0-9][0-9][0-9]-{'[0-9a-f]' * 32}"
"""Glob of the keys of slates, and of no others: the keys of a user have another letter in the place of the `r`."""

_MODEL_VERSION = re.compile(r"[A-Za-z0-9._-]{1,128}")


def bucket(subject_id: str) -> str:
    """`bNNN`, NNN = CRC16 of the id's UTF-8 bytes (the one Redis Cluster uses) modulo 256."""
    return f"b{binascii.crc_hqx(subject_id.encode(), 0) % NUM_BUCKETS:03d}"


def outbox_key(bucket_name: str) -> str:
    """The outbox stream of one bucket."""
    return f"bft:1:{{{bucket_name}}}:ev"


def all_outbox_keys() -> list[str]:
    """The outbox streams of all buckets."""
    return [outbox_key(f"b{number:03d}") for number in range(NUM_BUCKETS)]


def recommendation_key(bucket_name: str, recommendation_id: str) -> str:
    """A served slate, in the bucket of the user it was made for."""
    return f"bft:1:{{{bucket_name}}}:r:{recommendation_id}"


def bucket_of_slate(recommendation_id: str) -> str:
    """The bucket that a recommendation's id begins with."""
    return recommendation_id.partition("-")[0]


def slate_key(recommendation_id: str) -> str:
    """A served slate: hash of `a`, what was asked, `p0`, `p1` …, its pages, and `s`, what settled it."""
    return recommendation_key(bucket_of_slate(recommendation_id), recommendation_id)


def mark_key(key: str) -> str:
    """w: in the slot of this key, what is written behind a script, see service/states/confirming.py."""
    _, opening, rest = key.partition("{")
    return f"bft:1:{{{rest.partition('}')[0] if opening else key}}}:w"


def check_model_version(model_version: str) -> None:
    """A version has no colon, so that a state's key names one subject and one version.

    Raises:
        ValueError: not 1–128 letters, digits, dots, hyphens and underscores.
    """
    if not _MODEL_VERSION.fullmatch(model_version):
        raise ValueError(
            f"model version {model_version!r}; accepted: 1–128 letters, digits, dots, hyphens, underscores"
        )


class SubjectKeys(NamedTuple):
    """The keys of one subject, all in one slot. A session's have `n:` before the letter."""

    record: str
    """u: packed record, sliding life time."""
    seen: str
    """h: packed seen set, same life time."""
    identities: str
    """d: the last event identities, 8 bytes each, oldest first."""
    tombstone: str
    """x: a user's erasure, or that a session was merged, or is claimed for it."""
    recommendations: str
    """ri: list of the ids of the slates served to the subject."""
    outbox: str
    """ev: stream of the bucket."""
    state_prefix: str
    """s: before the model version."""

    @classmethod
    def of(cls, subject: Subject) -> "SubjectKeys":
        name = bucket(subject.id)
        prefix = f"bft:1:{{{name}}}:" + ("n:" if subject.kind == "session" else "")
        return cls(
            record=f"{prefix}u:{subject.id}",
            seen=f"{prefix}h:{subject.id}",
            identities=f"{prefix}d:{subject.id}",
            tombstone=f"{prefix}x:{subject.id}",
            recommendations=f"{prefix}ri:{subject.id}",
            outbox=outbox_key(name),
            state_prefix=f"{prefix}s:{subject.id}:",
        )

    def state(self, model_version: str) -> str:
        """s: encoded state of one model version."""
        return self.state_prefix + model_version


class Script:
    """A Lua script and the digest that EVALSHA knows it by."""

    def __init__(self, source: str) -> None:
        self.source: Final = source
        self.sha: Final = sha1(source.encode(), usedforsecurity=False).hexdigest()


APPEND = Script("""
-- Append events to one subject: record, seen set, identities and outbox together, or nothing.
-- KEYS  1 record  2 seen set  3 identities  4 tombstone  5 outbox stream
-- ARGV  1 now, ms            2 subject hash, 8 bytes   3 lineage hash, 8 bytes
--       4 life time of record and seen set, s          5 life time of identities, s
--       6 events kept        7 entries the outbox may hold
--       8 item numbers in one half of the seen set     9 identities kept
--      10 how long an erasure refuses undated events, ms
--      11 'user_id' or 'session_id', the outbox field  12 subject id
--      13 the session that these are merged from, or ''
--      14 numbers that only go into the seen set, packed u32, or ''
--      15… eight for each event: entry (12 bytes), '1' if undated else '0', identity (8 bytes or ''),
--          item id, type or '', weight in decimals, event id or '', recommendation id or ''
-- Returns {'ok', statuses}: a digit per event, 0 accepted, 1 duplicate, 2 refused by an erasure, 3 accepted, of an
--         item that the subject had before;
--         {'layout', schema}, {'lineage'} or {'outbox_full'}: nothing was written.
local SCHEMA, ERASED, MERGED, CLAIMED, ENTRY, HIGH = 1, 1, 2, 3, 12, 4294967296
local byte, char, floor, sub = string.byte, string.char, math.floor, string.sub
local now_ms, subject_hash, lineage_hash = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local subject_ttl_s, identity_ttl_s = ARGV[4], ARGV[5]
local max_len, outbox_limit = tonumber(ARGV[6]), tonumber(ARGV[7])
local half_limit, identity_limit = tonumber(ARGV[8]), tonumber(ARGV[9])
local undated_refusal_ms, merged_from = tonumber(ARGV[10]), ARGV[13]

-- Seen set ------------------------------------------------------------------------------------------------

local function varint(number)
  local bytes = ''
  while number >= 128 do
    bytes = bytes .. char(number % 128 + 128)
    number = floor(number / 128)
  end
  return bytes .. char(number)
end

-- The number whose difference from `previous` starts at `position`, and the position behind it.
local function next_number(deltas, position, previous)
  local value = byte(deltas, position)
  position = position + 1
  if value < 128 then return previous + value, position end
  local delta, place = value - 128, 128
  repeat
    value = byte(deltas, position)
    position = position + 1
    delta = delta + value % 128 * place
    place = place * 128
  until value < 128
  return previous + delta, position
end

-- Which of the ascending `numbers` the set `deltas` lacks, ascending.
local function lacking(deltas, numbers)
  local result, position, held = {}, 1, 0
  for _, number in ipairs(numbers) do
    while held < number and position <= #deltas do
      held, position = next_number(deltas, position, held)
    end
    if held ~= number then result[#result + 1] = number end
  end
  return result
end

-- `deltas` with ascending `numbers`, none of which it has.
local function inserted(deltas, numbers)
  local parts, position, previous = {}, 1, 0
  for _, number in ipairs(numbers) do
    local start, held, behind = position, previous, position
    while position <= #deltas do
      held, behind = next_number(deltas, position, previous)
      if held > number then break end
      previous, position = held, behind
    end
    parts[#parts + 1] = sub(deltas, start, position - 1)
    parts[#parts + 1] = varint(number - previous)
    previous = number
    if position <= #deltas then
      -- the number that follows is now counted from the inserted one
      deltas = sub(deltas, 1, position - 1) .. varint(held - number) .. sub(deltas, behind)
    end
  end
  parts[#parts + 1] = sub(deltas, position)
  return table.concat(parts)
end

-- The packed seen set with `numbers`, in order of arrival, nil when it had them all; and at which places of
-- `numbers` a new one stands for the first time. New ones go into the young half; when that is full it becomes
-- the old half, and what was in the old half is forgotten.
local function updated_seen(value, numbers)
  local old_count, young_count, old, young = 0, 0, '', ''
  if value and byte(value) == SCHEMA and sub(value, 2, 9) == subject_hash then
    local old_bytes
    old_count, young_count, old_bytes = struct.unpack('<I2I2I2', value, 10)
    old, young = sub(value, 16, 15 + old_bytes), sub(value, 16 + old_bytes)
  end
  local sorted, is_new = {}, {}
  for _, number in ipairs(numbers) do
    if not is_new[number] then
      is_new[number] = true
      sorted[#sorted + 1] = number
    end
  end
  table.sort(sorted)
  is_new = {}
  for _, number in ipairs(lacking(young, lacking(old, sorted))) do is_new[number] = true end

  local batch, is_first = {}, {}
  local function flush()
    table.sort(batch)
    young, batch = inserted(young, batch), {}
  end
  for place, number in ipairs(numbers) do
    if is_new[number] then
      is_new[number], is_first[place] = nil, true
      if young_count == half_limit then
        flush()
        old, old_count, young, young_count = young, young_count, '', 0
      end
      batch[#batch + 1] = number
      young_count = young_count + 1
    end
  end
  if #batch == 0 then return nil, is_first end
  flush()
  local header = char(SCHEMA) .. subject_hash .. struct.pack('<I2I2I2', old_count, young_count, #old)
  return header .. old .. young, is_first
end

-- History -------------------------------------------------------------------------------------------------

local function timestamp_of(entries, index)
  local low, high = struct.unpack('<I4I2', entries, index * ENTRY + 5)
  return low + high * HIGH
end

-- Where among the entries one of this time belongs: the number of entries before it, equals included.
local function place_of(entries, timestamp)
  local place = #entries / ENTRY
  while place > 0 and timestamp_of(entries, place - 1) > timestamp do place = place - 1 end
  return place
end

-- Identities ----------------------------------------------------------------------------------------------

local function has_identity(identities, identity)
  local found = string.find(identities, identity, 1, true)
  while found and found % 8 ~= 1 do found = string.find(identities, identity, found + 1, true) end
  return found ~= nil
end

-- Read ----------------------------------------------------------------------------------------------------

local erased_ms, count, epoch, entries = -1, 0, floor(now_ms / 1000), ''
-- A new record's epoch is the second of its creation, so that no state of an expired record fits it.
local tombstone, is_claimed = redis.call('GET', KEYS[4]), false
if tombstone and sub(tombstone, 2, 9) == subject_hash then
  is_claimed = byte(tombstone) == CLAIMED
  local low, high, next_epoch = struct.unpack('<I4I2I4', tombstone, 10)
  epoch = math.max(epoch, next_epoch)
  if byte(tombstone) == ERASED then erased_ms = low + high * HIGH end
end
local record = redis.call('GET', KEYS[1])
if record and byte(record) ~= SCHEMA then return {'layout', byte(record) or 0} end
if record and sub(record, 2, 9) == subject_hash then
  if sub(record, 10, 17) ~= lineage_hash then return {'lineage'} end
  count, epoch = struct.unpack('<I4I4', record, 18)
  entries = sub(record, 26)
end
local identities = redis.call('GET', KEYS[3]) or ''

-- Decide --------------------------------------------------------------------------------------------------

local statuses, accepted, numbers, late = {}, {}, {}, false
-- How often the user has an item at a time, before a merge: an event that was sent for both is there once, whatever
-- its name.
local held = {}
if merged_from ~= '' then
  for position = 1, #entries, ENTRY do
    local moment = sub(entries, position, position + 9)
    held[moment] = (held[moment] or 0) + 1
  end
end
if erased_ms < 0 then
  for position = 1, #ARGV[14], 4 do numbers[#numbers + 1] = struct.unpack('<I4', ARGV[14], position) end
end
for first = 15, #ARGV, 8 do
  local entry, undated, identity = ARGV[first], ARGV[first + 1] == '1', ARGV[first + 2]
  local timestamp, moment, status = timestamp_of(entry, 0), sub(entry, 1, 10), '0'
  if (undated and erased_ms >= 0 and now_ms < erased_ms + undated_refusal_ms)
      or (not undated and timestamp <= erased_ms) then
    status = '2'
  elseif (held[moment] or 0) > 0 or (identity ~= '' and has_identity(identities, identity)) then
    status = '1'
    held[moment] = (held[moment] or 0) - 1
  else
    identities = identities .. identity
    accepted[#accepted + 1] = first
    numbers[#numbers + 1] = struct.unpack('<I4', entry)
    if struct.unpack('<I2', entry, 11) > 0 then
      local place, kept = place_of(entries, timestamp), #entries / ENTRY
      late = late or place < kept
      -- before all kept ones, when others were kept once: its place is before the window
      if place > 0 or kept == count then
        entries = sub(entries, 1, place * ENTRY) .. entry .. sub(entries, place * ENTRY + 1)
        entries = sub(entries, -max_len * ENTRY)
      end
      count = count + 1
    end
  end
  statuses[#statuses + 1] = status
end
if #numbers == 0 then return {'ok', table.concat(statuses)} end
local num_entries = merged_from == '' and #accepted or 1
if redis.call('XLEN', KEYS[5]) + num_entries > outbox_limit then return {'outbox_full'} end
if late then epoch = epoch + 1 end
local seen, is_first = updated_seen(redis.call('GET', KEYS[2]), numbers)
for index, first in ipairs(accepted) do
  if not is_first[#numbers - #accepted + index] then statuses[(first - 15) / 8 + 1] = '3' end
end

-- Write ---------------------------------------------------------------------------------------------------

local header = char(SCHEMA) .. subject_hash .. lineage_hash .. struct.pack('<I4I4', count, epoch)
redis.call('SET', KEYS[1], header .. entries, 'EX', subject_ttl_s)
if seen then
  redis.call('SET', KEYS[2], seen, 'EX', subject_ttl_s)
else
  redis.call('EXPIRE', KEYS[2], subject_ttl_s)
end
if identities ~= '' then
  redis.call('SET', KEYS[3], sub(identities, -identity_limit * 8), 'EX', identity_ttl_s)
end
-- A claim lives as long as the record that it is of, and not for the next one.
if is_claimed and record then
  redis.call('EXPIRE', KEYS[4], subject_ttl_s)
elseif is_claimed then
  redis.call('SET', KEYS[4], char(MERGED) .. sub(tombstone, 2, 19), 'KEEPTTL')
end
if merged_from ~= '' then
  if seen or #accepted > 0 then
    redis.call('XADD', KEYS[5], '*', 'kind', 'merge', ARGV[11], ARGV[12], 'session_id', merged_from,
      'timestamp_ms', ARGV[1])
  end
  return {'ok', table.concat(statuses)}
end
for _, first in ipairs(accepted) do
  redis.call('XADD', KEYS[5], '*', 'kind', 'event', ARGV[11], ARGV[12], 'item_id', ARGV[first + 3],
    'timestamp_ms', string.format('%.0f', timestamp_of(ARGV[first], 0)), 'type', ARGV[first + 4],
    'weight', ARGV[first + 5], 'event_id', ARGV[first + 6], 'recommendation_id', ARGV[first + 7])
end
return {'ok', table.concat(statuses)}
""")

LOAD = Script("""
-- Read one subject; of its encoded state no more than is needed.
-- KEYS  1 record  2 seen set  3 encoded state
-- Returns {record, seen set, state}, nil for what is not there. A state of fewer events than the record comes whole.
--         Of one of as many only the head comes, up to its precision: nothing has to be folded into its cache.
--         One of another epoch or of more events is no use and stays.
local STATE_SCHEMA, HEADER = 2, 25
local record, seen = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])
local header = redis.call('GETRANGE', KEYS[3], 0, HEADER - 1)
if not record or #record < 25 or #header < HEADER or string.byte(header) ~= STATE_SCHEMA then
  return {record, seen, false}
end
local count, epoch = struct.unpack('<I4I4', record, 18)
local state_count, state_epoch, width = struct.unpack('<I4I4I2', header, 10)
local state = false
if state_epoch == epoch and state_count == count then
  state = redis.call('GETRANGE', KEYS[3], 0, HEADER + 8 * width - 1)
elseif state_epoch == epoch and state_count < count then
  state = redis.call('GET', KEYS[3])
end
return {record, seen, state}
""")

SAVE_STATE = Script("""
-- Keep an encoded state if it still belongs to the subject's history.
-- KEYS  1 record  2 state
-- ARGV  1 subject hash, 8 bytes  2 count of the state  3 epoch of the state  4 packed state  5 life time, s
-- Returns 1 when written; 0 when the record is gone, has another epoch, or has fewer events.
local header = redis.call('GETRANGE', KEYS[1], 0, 24)
if #header < 25 or string.byte(header) ~= 1 or string.sub(header, 2, 9) ~= ARGV[1] then return 0 end
local count, epoch = struct.unpack('<I4I4', header, 18)
if epoch ~= tonumber(ARGV[3]) or count < tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[2], ARGV[4], 'EX', ARGV[5])
return 1
""")

CLAIM_SESSION = Script("""
-- Read a session for the user who takes it over, and keep all others from it.
-- KEYS  1 record  2 seen set  3 mark of a merge
-- ARGV  1 subject hash, 8 bytes  2 claim hash, 8 bytes  3 life time of the claim, s
-- Returns {record, seen set}; {false, false} when there is no record; 'taken' when another user has claimed it.
local record, mark = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[3])
if not record then return {false, false} end
local before = struct.pack('<I4I2I4', 0, 0, 0)
if mark and string.sub(mark, 2, 9) == ARGV[1] then
  if string.byte(mark) == 3 and string.sub(mark, 20, 27) ~= ARGV[2] then return 'taken' end
  before = string.sub(mark, 10, 19)
end
redis.call('SET', KEYS[3], string.char(3) .. ARGV[1] .. before .. ARGV[2], 'EX', ARGV[3])
return {record, redis.call('GET', KEYS[2])}
""")

CLOSE_SESSION = Script("""
-- Empty a session that is as it was read, and note in which epoch the next one begins.
-- KEYS  1 record  2 seen set  3 mark of the merge
-- ARGV  1 now, ms  2 subject hash, 8 bytes  3 life time of the mark, s
--       4 count  5 epoch  6 size of the seen set, all as read; -1 when there was no record
-- Returns 1 when it is empty now; 0 when it has had events since.
local header = redis.call('GETRANGE', KEYS[1], 0, 24)
if #header < 25 or string.byte(header) ~= 1 or string.sub(header, 2, 9) ~= ARGV[2] then return 1 end
local count, epoch = struct.unpack('<I4I4', header, 18)
local seen, num_seen = redis.call('GETRANGE', KEYS[2], 0, 12), 0
if #seen == 13 and string.sub(seen, 2, 9) == ARGV[2] then
  local old_count, young_count = struct.unpack('<I2I2', seen, 10)
  num_seen = old_count + young_count
end
if count ~= tonumber(ARGV[4]) or epoch ~= tonumber(ARGV[5]) or num_seen ~= tonumber(ARGV[6]) then return 0 end
local now_ms = tonumber(ARGV[1])
local time = struct.pack('<I4I2', now_ms % 4294967296, math.floor(now_ms / 4294967296))
redis.call('SET', KEYS[3], string.char(2) .. ARGV[2] .. time .. struct.pack('<I4', epoch + 1), 'EX', ARGV[3])
redis.call('DEL', KEYS[1], KEYS[2])
return 1
""")

SAVE_SLATE = Script("""
-- Keep the first page of a slate, and list it with its subject.
-- KEYS  1 slate; for a subject also  2 its list of slates  3 its tombstone  4… slates to forget
-- ARGV  1 what was asked  2 the page  3 life time, s; for a subject also  4 subject hash, 8 bytes
--       5 when the subject was read, ms  6 slates in a list  7 how many to forget of a full one
--       8 id of the slate  9… ids of the slates to forget
-- Returns 1 when written; 0 when the subject was erased or merged since it was read; or, when its list is full, the ids
--         to forget: nothing was written, call again with these.
if #KEYS > 1 then
  for index = 4, #KEYS do
    redis.call('DEL', KEYS[index])
    redis.call('LREM', KEYS[2], 1, ARGV[index + 5])
  end
  local tombstone = redis.call('GET', KEYS[3])
  if tombstone and string.sub(tombstone, 2, 9) == ARGV[4] then
    local low, high = struct.unpack('<I4I2', tombstone, 10)
    if tonumber(ARGV[5]) <= low + high * 4294967296 then return 0 end
  end
  if redis.call('LLEN', KEYS[2]) >= tonumber(ARGV[6]) then
    return redis.call('LRANGE', KEYS[2], 0, ARGV[7] - 1)
  end
  redis.call('RPUSH', KEYS[2], ARGV[8])
  redis.call('EXPIRE', KEYS[2], ARGV[3])
end
redis.call('HSET', KEYS[1], 'a', ARGV[1], 'p0', ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
""")

LOAD_SLATE = Script("""
-- Read a slate.
-- KEYS  1 slate
-- Returns {what was asked, the pages in order}; {} when it is gone.
local fields, slate = redis.call('HGETALL', KEYS[1]), {}
for index = 1, #fields, 2 do slate[fields[index]] = fields[index + 1] end
local result = {slate['a']}
while slate['p' .. #result - 1] do result[#result + 1] = slate['p' .. #result - 1] end
return result
""")

APPEND_PAGE = Script("""
-- Add a page to a slate that has so many; its life time stays.
-- KEYS  1 slate
-- ARGV  1 number of pages  2 the page
-- Returns 1 when written; 0 when the slate has another number of pages, or is gone.
if redis.call('HEXISTS', KEYS[1], 'p' .. ARGV[1] - 1) == 0 then return 0 end
return redis.call('HSETNX', KEYS[1], 'p' .. ARGV[1], ARGV[2])
""")

SETTLE_SLATE = Script("""
-- Note what followed a slate; its life time stays.
-- KEYS  1 slate
-- ARGV  1 what followed
-- Returns 1 when it is noted now; 0 when it was before, or the slate is gone.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
return redis.call('HSETNX', KEYS[1], 's', ARGV[1])
""")

SEAL_SLATES = Script("""
-- The slates of a subject whose tombstone was just set. Those made until now are not kept any more: the time in the
-- tombstone is from before its script ran, and a list may have been made between the two.
-- KEYS  1 list of slates  2 tombstone
-- ARGV  1 now, ms  2 subject hash, 8 bytes
-- Returns the ids of the kept slates.
local tombstone, now_ms = redis.call('GET', KEYS[2]), tonumber(ARGV[1])
if tombstone and string.sub(tombstone, 2, 9) == ARGV[2] then
  local low, high = struct.unpack('<I4I2', tombstone, 10)
  if low + high * 4294967296 < now_ms then
    local time = struct.pack('<I4I2', now_ms % 4294967296, math.floor(now_ms / 4294967296))
    redis.call('SETRANGE', KEYS[2], 9, time)
  end
end
return redis.call('LRANGE', KEYS[1], 0, -1)
""")

FORGET_SLATES = Script("""
-- Remove slates of a subject, and take them off its list.
-- KEYS  1 list of slates  2… slates
-- ARGV  1… their ids
-- Returns the number of slates that were there.
local removed = 0
for index = 2, #KEYS do
  removed = removed + redis.call('DEL', KEYS[index])
  redis.call('LREM', KEYS[1], 1, ARGV[index - 1])
end
return removed
""")

ERASE = Script("""
-- Erase a user's history: tombstone, outbox entry and removal together.
-- KEYS  1 record  2 seen set  3 identities  4 tombstone  5 outbox stream
-- ARGV  1 now, ms  2 subject hash, 8 bytes  3 life time of the tombstone, s  4 user id
-- Returns {keys removed, id of the last outbox entry that may be the user's, or ''}.
-- The outbox limit does not hold here: an erasure is never refused.
local now_ms = tonumber(ARGV[1])
-- Above the epoch of any record created up to this second, known here or not.
local next_epoch = math.floor(now_ms / 1000) + 1
local header = redis.call('GETRANGE', KEYS[1], 0, 24)
if #header == 25 and string.byte(header) == 1 and string.sub(header, 2, 9) == ARGV[2] then
  next_epoch = math.max(next_epoch, struct.unpack('<I4', header, 22) + 1)
end
local tombstone = redis.call('GET', KEYS[4])
if tombstone and string.sub(tombstone, 2, 9) == ARGV[2] then
  next_epoch = math.max(next_epoch, (struct.unpack('<I4', tombstone, 16)))
end
local time = struct.pack('<I4I2', now_ms % 4294967296, math.floor(now_ms / 4294967296))
redis.call('SET', KEYS[4], string.char(1) .. ARGV[2] .. time .. struct.pack('<I4', next_epoch), 'EX', ARGV[3])
local removed = redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
if removed > 0 or not tombstone then
  local fields = {'kind', 'erase', 'user_id', ARGV[4], 'timestamp_ms', ARGV[1]}
  return {removed, redis.call('XADD', KEYS[5], '*', unpack(fields))}
end
local last = redis.call('XREVRANGE', KEYS[5], '+', '-', 'COUNT', 1)
return {removed, last[1] and last[1][1] or ''}
""")

ERASE_OUTBOX_PAGE = Script("""
-- Remove one user's events and merges from one page of an outbox stream; `erase` entries stay.
-- In place of a merge comes an `erase` entry of its session up to the merge: retraining may have the session's events,
-- which are the user's, and nothing else would tell it so any more.
-- KEYS  1 outbox stream
-- ARGV  1 user id  2 first entry id of the page ('-' or '(' .. id)  3 last entry id  4 entries in a page
-- Returns {entries removed, id of the last entry looked at, or '' when the page was not full}.
local page = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[3], 'COUNT', ARGV[4])
local ids = {}
for _, entry in ipairs(page) do
  local fields = {}
  for index = 1, #entry[2], 2 do fields[entry[2][index]] = entry[2][index + 1] end
  if fields['kind'] ~= 'erase' and fields['user_id'] == ARGV[1] then
    ids[#ids + 1] = entry[1]
    if fields['kind'] == 'merge' then
      redis.call('XADD', KEYS[1], '*', 'kind', 'erase', 'session_id', fields['session_id'],
        'timestamp_ms', fields['timestamp_ms'])
    end
  end
end
local removed = #ids > 0 and redis.call('XDEL', KEYS[1], unpack(ids)) or 0
return {removed, #page == tonumber(ARGV[4]) and page[#page][1] or ''}
""")

NUMBER_UNKNOWN = Script("""
-- Give lasting numbers to ids outside the catalogue: to all that have none, or to none.
-- KEYS  1 the hash of unknown ids
-- ARGV  1 the first number  2 ids that may have one  3… ids, distinct
-- Returns their numbers, in order; 'full' when they do not fit, and nothing was written.
local base, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local assigned = redis.call('HLEN', KEYS[1]) / 2
local numbers, new = {}, {}
for index = 3, #ARGV do
  local number = redis.call('HGET', KEYS[1], 'i' .. ARGV[index])
  if number then
    numbers[#numbers + 1] = tonumber(number)
  else
    numbers[#numbers + 1] = base + assigned + #new
    new[#new + 1] = index
  end
end
if assigned + #new > limit then return 'full' end
for offset, index in ipairs(new) do
  local number = string.format('%.0f', base + assigned + offset - 1)
  redis.call('HSET', KEYS[1], 'i' .. ARGV[index], number, 'n' .. number, ARGV[index])
end
return numbers
""")

# A version is no plain counter: after the server lost its data it would come to a number that replicas have seen.
_NEXT_VERSION = """
local function next_version(key, now_ms)
  local version = math.max(tonumber(redis.call('HGET', key, 'v') or 0) + 1, tonumber(now_ms))
  return string.format('%.0f', version)
end
"""

PUT_ITEM = Script(
    _NEXT_VERSION
    + """
-- Add an item at run time, or give it other metadata.
-- KEYS  1 the hash of added items
-- ARGV  1 now, ms  2 items that there may be  3 item id  4 metadata
-- Returns 'added', 'replaced', 'unchanged' or 'full'; with the last two nothing was written.
local field = 'i' .. ARGV[3]
local held = redis.call('HGET', KEYS[1], field)
if held == ARGV[4] then return 'unchanged' end
local count = redis.call('HLEN', KEYS[1]) - redis.call('HEXISTS', KEYS[1], 'v')
if not held and count >= tonumber(ARGV[2]) then return 'full' end
redis.call('HSET', KEYS[1], field, ARGV[4], 'v', next_version(KEYS[1], ARGV[1]))
return held and 'replaced' or 'added'
"""
)

REMOVE_ITEM = Script(
    _NEXT_VERSION
    + """
-- Take an item away that was added at run time.
-- KEYS  1 the hash of added items
-- ARGV  1 now, ms  2 item id
-- Returns 1, or 0 when it was not there.
if redis.call('HDEL', KEYS[1], 'i' .. ARGV[2]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'v', next_version(KEYS[1], ARGV[1]))
return 1
"""
)

LOAD_ITEMS = Script("""
-- All items that were added at run time, unless the caller has them.
-- KEYS  1 the hash of added items
-- ARGV  1 the version that the caller has; 0: none
-- Returns fields and values in turn, empty when there never was an item; nil when they are of that version.
if (redis.call('HGET', KEYS[1], 'v') or '0') == ARGV[1] then return false end
return redis.call('HGETALL', KEYS[1])
""")
