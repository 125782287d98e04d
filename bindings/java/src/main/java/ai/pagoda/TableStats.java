package ai.pagoda;

/**
 * Statistics of a table since it was opened.
 *
 * @param lookups lookups
 * @param keys keys, the different ones of each lookup; where the cache had all of them, every key as it was given
 * @param hits those that the cache had
 * @param defaults those that got the default vector
 * @param dropped keys that were not inserted in the background because the queue was full
 * @param cachedRows rows in the cache
 * @param cacheRows the capacity of the cache in rows
 * @param memory bytes of memory of the cache and the tiers, approximately
 * @param staleSeconds for how many seconds at most a change that did not go through this process may not have been
 *     seen; negative if it may not be seen at all, because nothing refreshes the cache
 */
public record TableStats(long lookups, long keys, long hits, long defaults, long dropped, long cachedRows,
        long cacheRows, long memory, long staleSeconds) {
    static TableStats of(long[] n) {
        return new TableStats(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8]);
    }
}
