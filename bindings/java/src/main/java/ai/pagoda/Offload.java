package ai.pagoda;

/** When histories go to the store. */
public enum Offload {
    /** When an owner is evicted to make room. */
    ON_EVICTION(0),
    /** With every commit, in the background. */
    AT_COMMIT(1),
    /** Only when the caller says so; what is evicted before is lost. */
    BY_HAND(2);

    final int number;

    Offload(int number) {
        this.number = number;
    }
}
