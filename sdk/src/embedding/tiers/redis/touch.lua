-- Records the use of rows of a partition. KEYS: rows, uses. ARGV: policy, then the keys.
local rows, uses = KEYS[1], KEYS[2]
local policy = ARGV[1]

local time = redis.call('TIME')
local now = time[1] .. string.format('%06d', tonumber(time[2]))

for place = 2, #ARGV do
    -- The record of a row that was evicted in the meantime would never be removed.
    if redis.call('HEXISTS', rows, ARGV[place]) == 1 then
        if policy == 'oldest' then
            redis.call('HSET', uses, ARGV[place], now)
        else
            redis.call('HINCRBY', uses, ARGV[place], 1)
        end
    end
end
