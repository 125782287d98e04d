//! Where nodes ran: ONNX Runtime's profile names the provider of each.

use std::path::Path;

use pagoda::Provider;

/// The name that ONNX Runtime has for a provider.
pub fn name(provider: Provider) -> &'static str {
    if provider == Provider::Cpu { "CPUExecutionProvider" } else { "CUDAExecutionProvider" }
}

/// Checks that nodes of these operators are in the profile, and that all of them ran on the provider of this name.
pub fn check(profile: &Path, provider: &str, operators: &[&str]) {
    let ran = nodes(profile);
    for operator in operators {
        let providers: Vec<_> = ran.iter().filter(|(name, _)| name == operator).map(|(_, provider)| provider).collect();
        assert!(!providers.is_empty() && providers.iter().all(|at| *at == provider), "{operator}: {providers:?}");
    }
}

/// The operator and the provider of each node that ran.
pub fn nodes(profile: &Path) -> Vec<(String, String)> {
    let events: serde_json::Value = serde_json::from_slice(&std::fs::read(profile).unwrap()).unwrap();
    let text = |event: &serde_json::Value, key| Some(event["args"][key].as_str()?.to_owned());
    events
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|event| Some((text(event, "op_name")?, text(event, "provider")?)))
        .collect()
}
