package ai.pagoda;

/** When lookups see a change. */
public enum Reach {
    /** When the call returns. */
    AT_ONCE(0),
    /** When the cache is refreshed next; the floors below have it when the call returns. */
    BY_REFRESH(1);

    final int number;

    Reach(int number) {
        this.number = number;
    }
}
