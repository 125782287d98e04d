package ai.pagoda;

/** What happens if prompt and answer do not fit into the model's context. */
public enum ContextEnd {
    /** The request is rejected. */
    REFUSE(0),
    /** The answer ends where the context does. */
    STOP(1);

    final int number;

    ContextEnd(int number) {
        this.number = number;
    }
}
