package ai.pagoda;

/**
 * The state of a generator, and counters since it was opened.
 *
 * @param answered answers that ended with a stop or at their length
 * @param endedEarly answers that were cancelled or exceeded their time limit
 * @param failed answers that failed, and requests that were rejected
 * @param steps steps
 * @param computedTokens rows that were computed
 * @param cachedTokens tokens of prompts whose keys and values were cached
 * @param generatedTokens tokens of answers
 * @param preemptions sequences that were preempted because pages ran out
 * @param waiting sequences that wait
 * @param running sequences that run
 * @param stepUs microseconds that the steps took in all
 * @param modelUs microseconds of them that the model took
 * @param draftedTokens tokens that were guessed and computed
 * @param acceptedTokens those of them that were right
 * @param drafts steps of a sequence with such tokens
 */
public record GeneratorStats(long answered, long endedEarly, long failed, long steps, long computedTokens,
        long cachedTokens, long generatedTokens, long preemptions, long waiting, long running, long stepUs, long modelUs,
        long draftedTokens, long acceptedTokens, long drafts) {
    static GeneratorStats of(long[] n) {
        return new GeneratorStats(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12],
                n[13], n[14]);
    }
}
