-- Writes rows into a partition, and evicts some if there are too many.
-- KEYS: rows, and uses unless the policy is random. ARGV: mode, layout, policy, margin, target, then key and value of each row.
-- Returns the number of evicted rows. If the partition has rows of another layout, returns that layout.
local rows, uses = KEYS[1], KEYS[2]
local mode, layout, policy = ARGV[1], ARGV[2], ARGV[3]
local margin, target = tonumber(ARGV[4]), tonumber(ARGV[5])
local first = 6

local there = redis.call('HGET', rows, 'layout')
if not there then
    redis.call('HSET', rows, 'layout', layout)
elseif there ~= layout then
    return there
end

-- Whether the version of one value is lower than that of another. The operator < of Lua depends on the locale.
local function is_older(one, other)
    for place = 1, 8 do
        local a, b = one:byte(place), other:byte(place)
        if a ~= b then
            return a < b
        end
    end
    return false
end

local function write(key, value)
    if mode == 'put' then
        return redis.call('HSETNX', rows, key, value) == 1
    end
    local old = redis.call('HGET', rows, key)
    if old and #old >= 8 and is_older(value, old) then
        return false
    end
    redis.call('HSET', rows, key, value)
    return true
end

local now
if policy == 'oldest' then
    local time = redis.call('TIME')
    now = time[1] .. string.format('%06d', tonumber(time[2]))
end

for place = first, #ARGV, 2 do
    local key = ARGV[place]
    if write(key, ARGV[place + 1]) then
        if policy == 'oldest' then
            redis.call('HSET', uses, key, now)
        elseif policy == 'least used' then
            redis.call('HSETNX', uses, key, 1)
        end
    end
end

-- Two fields are not rows: the layout, and a mark while an eviction takes several calls.
local leaving = redis.call('HEXISTS', rows, 'leaving')
local count = redis.call('HLEN', rows) - 1 - leaving
if count > margin and leaving == 0 then
    leaving = 1
    redis.call('HSET', rows, 'leaving', 1)
end
if leaving == 0 then
    return 0
end

-- More rows are evicted than were written, so that eviction ends; but not many more, so that the script is short.
local wanted = math.min(count - target, (#ARGV - first + 1) + 16)

-- Up to `most` unique keys of rows.
local function sample(most)
    local keys = {}
    for _, field in ipairs(redis.call('HRANDFIELD', rows, most + 2)) do
        if #field == 8 and #keys < most then
            keys[#keys + 1] = field
        end
    end
    return keys
end

-- The least recently or least frequently used of a sample of three times as many.
local function lowest(most)
    local keys = sample(3 * most)
    if #keys == 0 then
        return keys
    end
    local values = redis.call('HMGET', uses, unpack(keys))
    local order = {}
    for place, key in ipairs(keys) do
        order[place] = { key, tonumber(values[place] or 0) }
    end
    table.sort(order, function(a, b) return a[2] < b[2] end)
    local chosen = {}
    for place = 1, math.min(most, #order) do
        chosen[place] = order[place][1]
    end
    return chosen
end

local gone = 0
if wanted > 0 then
    local keys = policy == 'random' and sample(wanted) or lowest(wanted)
    if #keys > 0 then
        gone = redis.call('HDEL', rows, unpack(keys))
        if uses then
            redis.call('HDEL', uses, unpack(keys))
        end
    end
end
if count - gone <= target then
    redis.call('HDEL', rows, 'leaving')
end
return gone
