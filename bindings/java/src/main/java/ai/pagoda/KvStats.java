package ai.pagoda;

/**
 * What a cache has, and what it did since it was opened.
 *
 * @param pages pages of the pool
 * @param freePages free pages
 * @param sharedPages pages that more than one owner has, by {@link KvCache#fork}
 * @param residentOwners owners in the pool
 * @param residentTokens their tokens
 * @param tokensFromPool tokens of prepared histories that were in the pool
 * @param tokensFromStore tokens of prepared histories that came from the store
 * @param tokensNew tokens that were new
 * @param evictedOwners owners that left the pool
 * @param failedOffloads owners that left the pool, or were committed, and could not be handed to the store
 * @param failedOnloads histories that could not be read from the store
 */
public record KvStats(long pages, long freePages, long sharedPages, long residentOwners, long residentTokens,
        long tokensFromPool, long tokensFromStore, long tokensNew, long evictedOwners, long failedOffloads,
        long failedOnloads) {
    static KvStats of(long[] n) {
        return new KvStats(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10]);
    }
}
