package ai.pagoda;

/**
 * Where the model of an engine or a generator runs.
 *
 * @param provider {@link Provider#CPU} or {@link Provider#CUDA}
 * @param deviceId the number of the GPU; -1 on the CPU
 * @param reason why {@link Provider#AUTO} chose the CPU; empty in all other cases
 */
public record EngineProvider(Provider provider, int deviceId, String reason) {}
