package ai.pagoda;

import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;

/** The new tensors of a run, in the order in which they were asked for. Closing this closes them. */
public final class Outputs implements AutoCloseable, Iterable<Tensor> {
    private final List<String> names;
    private final List<Tensor> tensors;

    /** Takes the first handles over, one for each name, even if it throws. */
    Outputs(List<String> names, long[] handles) {
        this.names = names;
        List<Tensor> made = new ArrayList<>();
        try {
            for (int i = 0; i < names.size(); i++) {
                made.add(new Tensor(handles[i]));
            }
            tensors = List.copyOf(made);
        } catch (Throwable error) {
            made.forEach(Tensor::close);
            for (int i = made.size(); i < names.size(); i++) {
                Tensor.free(handles[i]);
            }
            throw error;
        }
    }

    /**
     * How many there are.
     *
     * @return the number
     */
    public int size() {
        return tensors.size();
    }

    /**
     * One of them.
     *
     * @param index which
     * @return the tensor; it is closed with this
     */
    public Tensor get(int index) {
        return tensors.get(index);
    }

    /**
     * One of them.
     *
     * @param name the name of the output
     * @return the tensor; it is closed with this
     */
    public Tensor get(String name) {
        int index = names.indexOf(name);
        if (index < 0) {
            throw new IllegalArgumentException("name: there is no output " + name + ", only " + names);
        }
        return tensors.get(index);
    }

    @Override
    public Iterator<Tensor> iterator() {
        return tensors.iterator();
    }

    /** Closes the tensors. */
    @Override
    public void close() {
        tensors.forEach(Tensor::close);
    }
}
