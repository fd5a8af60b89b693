//! `blockd completions`.

use blockd_media::error::Error;
use clap::Command;
use clap_complete::Shell;

use super::Context;

/// Print completions for a shell
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  blockd completions bash > /etc/bash_completion.d/blockd",
    long_about = "Print completions for a shell\n\nNeeds no daemon."
)]
pub(crate) struct Completions {
    /// Which shell
    pub shell: Shell,
}

impl Completions {
    pub(super) fn run(&self, context: &Context, mut line: Command) -> Result<(), Error> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut line, "blockd", &mut text);
        context.output.text(&String::from_utf8_lossy(&text))
    }
}
