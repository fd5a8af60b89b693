//! `blockd pool delete`.

use std::io::{BufRead, IsTerminal, Write};

use blockd_api::v1::{DeletePoolRequest, ErasedDevice, GetPoolRequest};
use blockd_media::error::{Error, ErrorKind, shown};
use serde::Serialize;

use super::super::Context;
use super::super::client::Client;

/// Delete a pool and erase it from its devices
///
/// The daemon forgets the pool. A file that `blockd pool create` made is removed; of other files
/// and of disks the first and last 2 MiB are overwritten with zeroes, so that no pool is found
/// there. Refused while the pool has volumes or snapshots, or is not open, unless forced; and while
/// the configuration names it. A pool that does not exist is not an error.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool delete fast\n  \
                  blockd pool delete --force --yes fast")]
pub(crate) struct Delete {
    /// The pool
    pub pool: String,

    /// Also with its volumes and snapshots, attached or not, and a pool that is not open
    ///
    /// The pool's name has to be typed to confirm that, on a terminal.
    #[arg(long)]
    pub force: bool,

    /// With --force, ask for no confirmation
    #[arg(long, requires = "force")]
    pub yes: bool,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Deleted {
    changed: bool,
    pool: String,
    deleted_volumes: u32,
    deleted_snapshots: u32,
    devices: Vec<Device>,
}

#[derive(Debug, Serialize)]
struct Device {
    path: String,
    erased: bool,
    removed: bool,
}

impl From<ErasedDevice> for Device {
    fn from(ErasedDevice { path, removed, erased }: ErasedDevice) -> Self {
        Self { path, erased, removed }
    }
}

impl Delete {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let mut client = context.client().await?;
        if self.force && !self.yes && exists(&mut client, &self.pool).await? {
            confirm(&self.pool, "pool")?;
        }
        let request = DeletePoolRequest { name: self.pool.clone(), force: self.force };
        let answer = client.delete_pool(request).await?;
        let deleted = Deleted {
            changed: answer.changed,
            pool: self.pool,
            deleted_volumes: answer.deleted_volumes,
            deleted_snapshots: answer.deleted_snapshots,
            devices: answer.devices.into_iter().map(Device::from).collect(),
        };
        context.output.either(&deleted, || deleted.text())
    }
}

async fn exists(client: &mut Client, name: &str) -> Result<bool, Error> {
    match client.get_pool(GetPoolRequest { name: name.to_owned() }).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        other => other.map(|_| true),
    }
}

/// Has the name of what is to be deleted typed.
pub(crate) fn confirm(name: &str, kind: &str) -> Result<(), Error> {
    if !std::io::stdin().is_terminal() {
        let allowed = "given with --force where no terminal can confirm that";
        return Err(Error::invalid("yes", false, allowed));
    }
    let mut typed = String::new();
    let question =
        format!("Type the name of {kind} {} to delete it and all it holds: ", shown(name));
    let asked = std::io::stderr()
        .write_all(question.as_bytes())
        .and_then(|()| std::io::stdin().lock().read_line(&mut typed));
    asked.map_err(|source| Error::io("reading the confirmation", source))?;
    match typed.trim_end_matches(['\n', '\r']) == name {
        true => Ok(()),
        false => {
            Err(Error::invalid("confirmation", typed.trim_end(), format!("the {kind}'s name")))
        }
    }
}

impl Deleted {
    fn text(&self) -> String {
        let name = &self.pool;
        if !self.changed {
            return format!("{name}: there was no such pool\n");
        }
        let mut text = match (self.deleted_volumes, self.deleted_snapshots) {
            (0, 0) => format!("{name}: deleted\n"),
            (volumes, snapshots) => {
                format!("{name}: deleted with {volumes} volume(s) and {snapshots} snapshot(s)\n")
            }
        };
        for Device { path, erased, removed } in &self.devices {
            let what = match (erased, removed) {
                (_, true) => "the file is removed",
                (true, false) => "erased, holds no pool any more",
                (false, false) => "not erased: it was not there, or is not known to hold the pool",
            };
            text.push_str(&format!("{path}: {what}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_says_what_became_of_each_device() {
        let device =
            |path: &str, erased, removed| Device { path: path.to_owned(), erased, removed };
        let deleted = Deleted {
            changed: true,
            pool: "p".to_owned(),
            deleted_volumes: 2,
            deleted_snapshots: 0,
            devices: vec![device("/a", true, true), device("/b", true, false)],
        };
        let expected = "p: deleted with 2 volume(s) and 0 snapshot(s)\n\
                        /a: the file is removed\n/b: erased, holds no pool any more\n";
        assert_eq!(deleted.text(), expected);
        let absent = Deleted { changed: false, ..deleted };
        assert_eq!(absent.text(), "p: there was no such pool\n");
    }
}
