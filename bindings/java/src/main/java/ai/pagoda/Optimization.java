package ai.pagoda;

/** How much ONNX Runtime rewrites the graph when a model is opened. */
public enum Optimization {
    /** Everything it can do. */
    ALL(0),
    /** Nothing. */
    NONE(1),
    /** What keeps the graph standard ONNX. */
    BASIC(2),
    /** Fusions of nodes too, but not of memory layouts. */
    EXTENDED(3);

    final int number;

    Optimization(int number) {
        this.number = number;
    }
}
