package ai.pagoda;

/**
 * What an engine did since it was opened.
 *
 * @param answered requests that were answered
 * @param failed requests that failed, for whatever reason
 * @param batches batches that ran
 * @param cachedRows rows of histories that were cached
 * @param computedRows rows of histories that were computed
 * @param waiting requests that wait now
 * @param rememberedUsers users whose events are remembered
 * @param rememberedBytes bytes that those take
 */
public record EngineStats(long answered, long failed, long batches, long cachedRows, long computedRows, long waiting,
        long rememberedUsers, long rememberedBytes) {
    static EngineStats of(long[] n) {
        return new EngineStats(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7]);
    }
}
