package ai.pagoda;

/** From which tiers histories are removed. */
public enum Tiers {
    /** The pool. */
    RESIDENT(1),
    /** The store. */
    STORE(2),
    /** Both. */
    ALL(3);

    final int number;

    Tiers(int number) {
        this.number = number;
    }
}
