//! The command line of the recorder.

use std::path::PathBuf;

use blockd_csi_base::error::Invalid;
use blockd_csi_base::quantity;
use clap::Parser;

/// Smallest recording: the header, a call and the last line fit.
const SMALLEST: i64 = 64 << 10;

/// Callers that are named in the header: a pod has fewer sidecars.
const MOST_CALLERS: usize = 32;

/// Passes calls of the kubelet and the sidecars on to the plugin unchanged, and records them
/// without secrets, one line of JSON each, until it is stopped by SIGTERM or SIGINT.
#[derive(Parser, Clone, Debug)]
#[command(name = "blockd-csi record", max_term_width = 100)]
pub struct Options {
    /// Unix socket on which the kubelet and the sidecars call
    #[arg(long, value_name = "PATH")]
    pub listen: PathBuf,

    /// Number of a group that may call too, as --endpoint-group of the plugin has it
    #[arg(long, value_name = "GID")]
    pub listen_group: Option<u32>,

    /// Unix socket of the plugin; it need not be there yet
    #[arg(long, value_name = "PATH")]
    pub to: PathBuf,

    /// File to write; where it exists, a number is added to the name
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,

    /// Name and version of a caller, for the header, as in "external-provisioner v5.3.0"; can be
    /// repeated
    #[arg(long = "caller", value_name = "TEXT")]
    pub callers: Vec<String>,

    /// Largest file: later calls are passed on and not recorded. The default is about 60,000 calls,
    /// and compressed it is small enough to be sent
    #[arg(long, value_name = "SIZE", default_value = "64Mi")]
    pub limit: String,
}

impl Options {
    /// The largest file in bytes.
    ///
    /// # Errors
    /// The text is no size, or the size too small.
    pub fn limit_bytes(&self) -> Result<u64, Invalid> {
        let size = quantity::size("--limit", &self.limit)?.get();
        u64::try_from(size).ok().filter(|_| size >= SMALLEST).ok_or_else(|| {
            Invalid::new("--limit", &self.limit, format_args!("{SMALLEST} bytes or more"))
        })
    }

    /// Checks the remaining rules.
    ///
    /// # Errors
    /// An option is out of range.
    pub fn check(&self) -> Result<(), Invalid> {
        self.limit_bytes()?;
        if self.listen == self.to {
            let allowed = "another path than --to";
            return Err(Invalid::new("--listen", self.listen.display(), allowed));
        }
        if self.callers.len() > MOST_CALLERS {
            let allowed = format!("given at most {MOST_CALLERS} times");
            return Err(Invalid::new("--caller", self.callers.len(), allowed));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parse(words: &[&str]) -> Options {
        let all = [&["record", "--listen", "/l", "--to", "/t", "--out", "/o"], words].concat();
        Options::try_parse_from(all).unwrap()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
        let options = parse(&[]);
        options.check().unwrap();
        assert_eq!(options.limit_bytes().unwrap(), 64 << 20);
    }

    #[test]
    fn bad_options_name_their_flag() {
        for (words, flag) in [
            (&["--limit", "1Ki"][..], "--limit is "),
            (&["--limit", "much"], "--limit is "),
            (&["--caller", "a"].repeat(33), "--caller is "),
        ] {
            let error = parse(words).check().unwrap_err();
            assert!(error.to_string().starts_with(flag), "{error}");
        }
        let options = Options { listen: "/t".into(), ..parse(&[]) };
        assert!(options.check().unwrap_err().to_string().starts_with("--listen is "));
    }
}
