package ai.pagoda;

/**
 * The state of an engine, and counters since it was opened.
 *
 * @param answered requests that were answered
 * @param failed requests that failed, for any reason
 * @param batches batches
 * @param cachedRows rows of histories that were cached
 * @param computedRows rows of histories that were computed
 * @param waiting requests in the queue
 * @param rememberedUsers users in the event log
 * @param rememberedBytes bytes of the event log
 */
public record EngineStats(long answered, long failed, long batches, long cachedRows, long computedRows, long waiting,
        long rememberedUsers, long rememberedBytes) {
    static EngineStats of(long[] n) {
        return new EngineStats(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7]);
    }
}
