-- Notes that rows of a partition were used. KEYS: rows, uses. ARGV: policy, then the keys.
local rows, uses = KEYS[1], KEYS[2]
local policy = ARGV[1]

local time = redis.call('TIME')
local now = time[1] .. string.format('%06d', tonumber(time[2]))

for place = 2, #ARGV do
    -- A row that has left meanwhile would leave its note behind.
    if redis.call('HEXISTS', rows, ARGV[place]) == 1 then
        if policy == 'oldest' then
            redis.call('HSET', uses, ARGV[place], now)
        else
            redis.call('HINCRBY', uses, ARGV[place], 1)
        end
    end
end
