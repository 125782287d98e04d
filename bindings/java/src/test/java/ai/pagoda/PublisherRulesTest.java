package ai.pagoda;

import java.util.concurrent.Flow;
import org.reactivestreams.tck.TestEnvironment;
import org.reactivestreams.tck.flow.FlowPublisherVerification;
import org.testng.Assert;
import org.testng.annotations.AfterClass;
import org.testng.annotations.BeforeClass;

/** The rules of reactive streams, by their own tests, for the tokens of a model. */
public class PublisherRulesTest extends FlowPublisherVerification<Token> {
    /** A machine that is busy with other tests is slow; and this long the tests wait for what must not come. */
    private static final long TIMEOUT_MILLIS = 2_000;
    private static final long SILENCE_MILLIS = 100;
    private static final long COLLECTED_MILLIS = 300;

    private long before;
    private Generator generator;
    /** No thread runs its steps. */
    private Generator idle;

    /** For TestNG. */
    public PublisherRulesTest() {
        super(new TestEnvironment(TIMEOUT_MILLIS, SILENCE_MILLIS), COLLECTED_MILLIS);
    }

    /** Opens the model. */
    @BeforeClass
    public void open() {
        before = Pagoda.liveObjects();
        generator = GeneratorTest.open();
        idle = GeneratorTest.stepped();
    }

    /** Nothing is left, although some of the tests neither read to the end nor cancel. */
    @AfterClass
    public void close() {
        generator.close();
        idle.close();
        Support.eventually(() -> Pagoda.liveObjects() == before, () -> "objects are left");
        Assert.assertEquals(Pagoda.liveObjects(), before);
    }

    /** As many as fit into the context of the model. */
    @Override
    public long maxElementsFromPublisher() {
        return 500;
    }

    @Override
    public Flow.Publisher<Token> createFlowPublisher(long elements) {
        TokenStream stream = generator.stream(GeneratorTest.likely((int) Math.max(elements, 1)));
        if (elements == 0) {
            // No answer is empty, but one that was read is.
            Assert.assertEquals(stream.tokens().count(), 1);
        }
        return stream.publisher();
    }

    @Override
    public Flow.Publisher<Token> createFailedFlowPublisher() {
        TokenStream stream = idle.stream(GeneratorTest.likely(3));
        stream.response().cancel(true);
        return stream.publisher();
    }
}
