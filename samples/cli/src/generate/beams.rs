//! The options of a beam search.

use pagoda::engine::BeamOptions;
use pagoda_requests::generate::early_stop;

#[derive(clap::Args)]
pub struct BeamArguments {
    /// Search answers with so many beams, 1 to 16, instead of drawing tokens; -n of them are printed, the best first.
    #[arg(long, value_name = "N", conflicts_with_all = ["temperature", "session"])]
    beams: Option<u32>,
    /// With --beams: above 0 long answers get better scores, below 0 short ones.
    #[arg(long, default_value_t = 1.0, value_name = "X", requires = "beams", allow_negative_numbers = true)]
    length_penalty: f32,
    /// With --beams: when the search ends that has as many whole answers as beams. true: at once; false: when no beam is better
    /// than the worst of them; never: when none can become better.
    #[arg(long, default_value = "false", value_name = "WHEN", requires = "beams", value_parser = ["true", "false", "never"])]
    early_stop: String,
}

impl BeamArguments {
    /// The search, if one is asked for.
    pub fn options(&self) -> Option<BeamOptions> {
        let early_stop = early_stop(&self.early_stop).unwrap_or_default();
        Some(BeamOptions { width: self.beams?, length_penalty: self.length_penalty, early_stop })
    }
}
