package ai.pagoda;

import java.nio.file.Path;
import java.util.Map;

/** What LoadingTest runs in processes of their own: a model, so that ONNX Runtime is found too. */
final class LoadingProgram {
    private LoadingProgram() {}

    /** Ends without closing what it has, which must do no harm. */
    public static void main(String[] arguments) {
        Model model = Model.open(Path.of(arguments[0]), new ModelOptions().provider(Provider.CPU));
        model.runAsync(Map.of("x", Tensor.zeros(ElementType.F32, 1, 4)), "y").join();
        System.out.println("it runs, Pagoda " + Pagoda.version());
    }
}
