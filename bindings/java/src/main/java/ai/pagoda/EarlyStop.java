package ai.pagoda;

/** When a beam search ends that has as many finished answers as beams. */
public enum EarlyStop {
    /** When no beam has a better score at its length than the worst of them. */
    WHEN_UNLIKELY(0),
    /** At once. */
    WHEN_FULL(1),
    /** When no beam can get a better score at any length than the worst of them. */
    NEVER(2);

    final int number;

    EarlyStop(int number) {
        this.number = number;
    }
}
