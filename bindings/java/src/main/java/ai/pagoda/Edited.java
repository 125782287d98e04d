package ai.pagoda;

/** What happens when the items of a request are not those that the cached history was computed from. */
public enum Edited {
    /** Items are not checked: requests have none. */
    UNNOTICED(0),
    /** The request is refused. */
    REFUSE(1),
    /** What was computed from the edited part is dropped; what came before it stays. */
    INVALIDATE(2);

    final int number;

    Edited(int number) {
        this.number = number;
    }
}
