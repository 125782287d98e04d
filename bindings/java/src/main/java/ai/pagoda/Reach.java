package ai.pagoda;

/** When lookups see a change. */
public enum Reach {
    /** When the call returns. */
    AT_ONCE(0),
    /** At the next refresh of the cache. The backing tiers have the update when the call returns. */
    BY_REFRESH(1);

    final int number;

    Reach(int number) {
        this.number = number;
    }
}
