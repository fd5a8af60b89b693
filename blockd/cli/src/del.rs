//! `blockd del`.

use std::io::IsTerminal as _;

use blockd_api::v1::{DeleteVolumeRequest, GetVolumeRequest, Volume, VolumeKind, VolumeState};
use blockd_media::error::{Error, ErrorKind, shown};
use blockd_media::units;
use serde::Serialize;

use super::client::Client;
use super::{Context, amount, answers, encryption, names};

/// Detach a volume and delete it with all it holds
///
/// Refused while clients are connected or the block device is in use (mounted, open, or part of
/// another device), unless forced: then connections are closed, IO to the device fails, and so do
/// writes that wait for space. A volume that does not exist is not an error. On a terminal, a
/// volume that holds data is deleted only once a question was answered with y; in a script, where
/// input or output is no terminal, nothing is asked. The mapping of a volume that was added with
/// --encrypt is closed first, which is refused while it is in use.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd del data\n  blockd del scratch --yes")]
pub(crate) struct Del {
    /// The volume, NAME or POOL/NAME
    pub name: String,

    /// The pool that it is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Also when clients are connected or the block device is used
    #[arg(long)]
    pub force: bool,

    /// Do not ask before data is lost
    #[arg(short, long)]
    pub yes: bool,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Deleted {
    changed: bool,
    detached: bool,
    closed_connections: u32,
    freed_bytes: u64,
}

impl Del {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name])?;
        let mut client = context.client().await?;
        let is_asked = !self.yes
            && !context.output.is_json()
            && context.output.terminal().interactive
            && std::io::stdin().is_terminal();
        if is_asked {
            confirm(&mut client, &self.name, &self.pool).await?;
        }
        encryption::close(&mut client, &self.name, &self.pool, false).await?;
        let name = self.name;
        let request = DeleteVolumeRequest {
            name: name.clone(),
            pool: self.pool,
            force: self.force,
            detach: true,
        };
        let answer = client.delete_volume(request).await?;
        let is_overwritten =
            answer.volume.as_ref().filter(|one| one.state() == VolumeState::Scrubbing);
        let overwritten = is_overwritten.map(|one| units::human(amount(one.charged_bytes)));
        let deleted = Deleted {
            changed: answer.changed,
            detached: answer.detached,
            closed_connections: answer.closed_connections,
            freed_bytes: answer.volume.map_or(0, |volume| amount(volume.exclusive_bytes)),
        };
        context.output.either(&deleted, || match overwritten {
            Some(bytes) => format!("{name}: deleted, {bytes} come free when overwritten\n"),
            None if deleted.changed => {
                format!("{name}: deleted, {} freed\n", units::human(deleted.freed_bytes))
            }
            None => format!("{name}: there was no such volume\n"),
        })
    }
}

/// Asks whether a volume with data may be deleted. An error if not.
async fn confirm(client: &mut Client, name: &str, pool: &str) -> Result<(), Error> {
    let request = GetVolumeRequest { name: name.to_owned(), pool: pool.to_owned() };
    let volume = match client.get_volume(request).await {
        Ok(answer) => answers::volume(answer.volume)?,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let Some(question) = question(&volume) else { return Ok(()) };
    eprint!("{question} [y/N] ");
    let mut answer = String::new();
    std::io::stdin()
        .read_line(&mut answer)
        .map_err(|source| Error::io("reading the answer", source))?;
    if is_yes(&answer) {
        return Ok(());
    }
    Err(Error::in_use(format!("volume {}", shown(name)), "is kept: the answer was not y"))
}

/// The question about a volume that holds data.
fn question(volume: &Volume) -> Option<String> {
    let held =
        if answers::is_namespace(volume) { volume.charged_bytes } else { volume.valid_bytes };
    let what = if volume.kind() == VolumeKind::Snapshot { "snapshot" } else { "volume" };
    let held = Some(amount(held)).filter(|bytes| *bytes > 0)?;
    let (name, pool, held) = (shown(&volume.name), shown(&volume.pool), units::human(held));
    Some(format!("delete {what} {name} of pool {pool} with {held} of data?"))
}

fn is_yes(answer: &str) -> bool {
    ["y", "yes"].contains(&answer.trim().to_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_data_is_asked_about() {
        let (name, pool) = ("data".to_owned(), "default".to_owned());
        let volume = Volume { name, pool, size_bytes: 10 << 30, ..Volume::default() };
        assert_eq!(question(&volume), None);
        let held = Volume { valid_bytes: 3 << 30, ..volume };
        let asked = "delete volume data of pool default with 3 GiB of data?";
        assert_eq!(question(&held).as_deref(), Some(asked));
    }

    #[test]
    fn only_yes_is_yes() {
        for (answer, expected) in
            [("y\n", true), ("Yes", true), (" y ", true), ("", false), ("\n", false), ("n", false)]
        {
            assert_eq!(is_yes(answer), expected, "{answer:?}");
        }
    }
}
