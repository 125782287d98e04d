package ai.pagoda;

/** How the rows of a slot's keys become one vector. */
public enum Combiner {
    /** Their sum. */
    SUM(0),
    /** Their mean. */
    MEAN(1),
    /** Their sum, divided by the square root of how many there are. */
    SQRTN(2);

    final int number;

    Combiner(int number) {
        this.number = number;
    }
}
