package ai.pagoda;

import java.util.ArrayList;
import java.util.List;

/**
 * An input or an output of a model.
 *
 * @param name its name
 * @param type the type of its elements; {@link ElementType#UNDEFINED} if it is not a tensor
 * @param hasDims whether the model says how many dimensions there are
 * @param dims its dimensions, -1 where one is free
 * @param symbols for each dimension the name of its symbol; empty where it is fixed or has none
 */
public record ValueInfo(String name, ElementType type, boolean hasDims, List<Long> dims, List<String> symbols) {
    /**
     * An input or an output of a model.
     *
     * @param name its name
     * @param type the type of its elements
     * @param hasDims whether the model says how many dimensions there are
     * @param dims its dimensions; a copy is kept
     * @param symbols their symbols; a copy is kept
     */
    public ValueInfo {
        dims = List.copyOf(dims);
        symbols = List.copyOf(symbols);
    }

    /** From what the native part gives: the name, the dimensions or null, the symbols with a NUL after each. */
    static ValueInfo of(int type, byte[] name, long[] dims, byte[] symbols) {
        List<Long> all = new ArrayList<>();
        for (long dim : dims == null ? new long[0] : dims) {
            all.add(dim);
        }
        List<String> names = all.isEmpty() ? List.of() : List.of(Native.string(symbols).split("\0", -1));
        return new ValueInfo(
                Native.string(name), ElementType.of(type), dims != null, all, names.subList(0, all.size()));
    }
}
