//! `blockd-csi move`: the content of a volume goes to the daemon of another node, by `blockd
//! replicate`; the answer is the PersistentVolume for that node and the commands that put it into
//! the cluster.

mod script;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use blockd_api::v1;
use blockd_csi_base::error::{cut, shown};
use blockd_csi_base::options::{DEFAULT_DRIVER, check_driver};
use clap::Parser;
use serde::Serialize;
use serde_json::Value;

use super::print;
use super::pv::{self, PersistentVolume};
use crate::daemon::Daemon;
use crate::error::Error;
use crate::ids::{Names, VolumeId};
use crate::topology::Place;

/// The label that `blockd replicate` gives a snapshot once its receiver has all of it.
const SENT: &str = "blockd.io/sent-to";

/// Most of a program's error that is repeated.
const MAX_ERROR_BYTES: usize = 2048;

/// Moves a volume of this node to another node: sends its content by `blockd replicate` to a
/// `blockd receive --listen` there, and prints a script with the PersistentVolume for that node.
/// The volume must not be in use. Repeat the command after a break: what has arrived is not sent
/// again
#[derive(Clone, Parser, Debug)]
#[command(
    name = "blockd-csi move",
    max_term_width = 100,
    after_help = "Example:\n  kubectl get pv pvc-1 -o json >pv.json\n  blockd-csi move --pv pv.json \
                  --from-node worker-1 --to-node worker-2 \\\n      --receiver \
                  tcp://worker-2:7010 -- --tls-cert host.pem --tls-key host.key \\\n      --tls-ca \
                  ca.pem >swap.sh"
)]
pub struct Options {
    /// The PersistentVolume as `kubectl get pv NAME -o json` prints it: a file, or "-" for standard
    /// input
    #[arg(long, value_name = "FILE")]
    pub pv: PathBuf,

    /// The name of this node, to which the PersistentVolume has to belong: a copy that stayed here
    /// after an earlier move is not moved again
    #[arg(long, value_name = "NODE")]
    pub from_node: String,

    /// The node that the volume moves to
    #[arg(long, value_name = "NODE")]
    pub to_node: String,

    /// The pool there, as --pool of the receiver [default: a pool with the name of the one here]
    #[arg(long, value_name = "POOL")]
    pub to_pool: Option<String>,

    /// The receiver there, a `blockd receive --listen --pool POOL` that takes any name
    #[arg(long, value_name = "tcp://HOST:PORT")]
    pub receiver: String,

    /// Send nothing: check that `blockd replicate` has sent all of it to the receiver. For a
    /// container that has no program `blockd`
    #[arg(long)]
    pub sent: bool,

    /// Delete the volume here and the snapshots that were sent, once the receiver has confirmed
    /// that it has the last of them; later writes are not sent. Run this when the new
    /// PersistentVolume is bound and before pods use it, since a receiver confirms no volume that
    /// is used or was written there
    #[arg(long, conflicts_with = "sent")]
    pub delete_source: bool,

    /// Name of the driver, as in the CSIDriver object
    #[arg(long, value_name = "NAME", default_value = DEFAULT_DRIVER)]
    pub driver_name: String,

    /// Control socket of the daemon
    #[arg(long, value_name = "PATH", default_value = "/run/blockd/control.sock")]
    pub blockd_socket: PathBuf,

    /// The program that sends
    #[arg(long, value_name = "PROGRAM", default_value = "blockd")]
    pub blockd: PathBuf,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// More options for `blockd replicate`: certificates, --compress
    #[arg(last = true, value_name = "OPTION")]
    pub more: Vec<String>,
}

/// The answer.
#[derive(Serialize, Debug)]
pub struct Answer {
    /// The volume's id here.
    volume_id: String,
    /// Its id on the other node.
    new_volume_id: String,
    node: String,
    /// The node that it moves from.
    #[serde(skip)]
    from_node: String,
    /// UID of the PersistentVolume that was given.
    #[serde(skip)]
    former_uid: String,
    /// The snapshot that the receiver has; null where the source was deleted before.
    snapshot: Option<String>,
    /// False: the receiver had all of it before.
    changed: bool,
    source_deleted: bool,
    /// The command for the other node that gives the volume its labels and settings.
    configure: Option<String>,
    persistent_volume: Value,
    /// The policy to set once the new PersistentVolume is bound, where it is not Retain.
    reclaim_policy: Option<String>,
}

/// A move whose options are checked.
struct Move<'a> {
    options: &'a Options,
    daemon: Daemon,
    id: VolumeId,
}

impl Options {
    /// Moves the volume, and prints the answer.
    ///
    /// # Errors
    /// An option or the PersistentVolume is not as it has to be, the volume is in use, or it could
    /// not be sent.
    pub async fn run(&self) -> Result<(), Error> {
        let answer = self.answer(Daemon::new(self.blockd_socket.clone())).await?;
        print(self.json.then_some(&answer), || script::script(&answer))
    }

    /// Moves the volume.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub async fn answer(&self, daemon: Daemon) -> Result<Answer, Error> {
        check_driver(&self.driver_name)?;
        crate::options::check_node("--from-node", &self.from_node)?;
        crate::options::check_node("--to-node", &self.to_node)?;
        // A volume has its name there too, or the new PersistentVolume would name none.
        if self.receiver.strip_prefix("tcp://").is_none_or(|rest| rest.contains('/')) {
            let allowed = "like tcp://HOST:PORT, without a name behind it";
            return Err(Error::invalid("--receiver", &self.receiver, allowed));
        }
        let (value, volume) = pv::read_one(&self.pv, &self.driver_name)?;
        let id = self.check(&volume)?;
        let to = VolumeId {
            pool: self.to_pool.clone().unwrap_or_else(|| id.pool.clone()),
            name: id.name.clone(),
        };
        let names = Names::new(&self.driver_name);
        names.check_pool("--to-pool", &to.pool)?;
        if names.parse_volume(&to.to_string()).is_none() {
            return Err(Error::invalid("--to-pool", &to.pool, "the name of a pool"));
        }
        let place = Place::new(&self.driver_name, &self.to_node);
        let mut answer = Answer {
            volume_id: id.to_string(),
            new_volume_id: to.to_string(),
            node: self.to_node.clone(),
            from_node: self.from_node.clone(),
            former_uid: volume.uid().to_owned(),
            snapshot: None,
            changed: false,
            source_deleted: false,
            configure: None,
            persistent_volume: script::for_node(&value, &to.to_string(), &place),
            reclaim_policy: volume.is_deleted_with_claim().then(|| "Delete".to_owned()),
        };
        Move { options: self, daemon, id }.run(&to, &mut answer).await?;
        Ok(answer)
    }

    /// The volume's id. Refuses a PersistentVolume that can't be moved.
    fn check(&self, volume: &PersistentVolume) -> Result<VolumeId, Error> {
        let refused = |problem: String| Error::in_use("--pv", problem);
        let place = Place::new(&self.driver_name, &self.to_node);
        if volume.is_only_on(&place.key, &place.node) {
            let problem = format!("{} is on node {} already", volume.name(), place.node);
            return Err(refused(problem));
        }
        let here = Place::new(&self.driver_name, &self.from_node);
        if !volume.is_only_on(&here.key, &here.node) {
            let problem = format!(
                "{} is not on node {} of --from-node: run this on its node, with the \
                 PersistentVolume as it is now",
                volume.name(),
                here.node
            );
            return Err(refused(problem));
        }
        let id = Names::new(&self.driver_name).parse_volume(volume.handle());
        id.ok_or_else(|| {
            let handle = shown(volume.handle());
            refused(format!("{} has volumeHandle {handle}, which is no volume", volume.name()))
        })
    }
}

impl Move<'_> {
    async fn run(&self, to: &VolumeId, answer: &mut Answer) -> Result<(), Error> {
        let Some(volume) = self.daemon.find_volume(&self.id.pool, &self.id.name).await? else {
            // It was deleted by an earlier try.
            if self.options.delete_source {
                return self.delete_snapshots().await;
            }
            return Err(Error::not_found("volume", &self.id));
        };
        self.check_unused(&volume)?;
        answer.configure = Some(script::configure(&volume, to));
        let mut sent = self.sent(&volume).await?;
        if sent.is_none() && !self.options.sent && !self.options.delete_source {
            self.replicate()?;
            answer.changed = true;
            let volume = self.daemon.find_volume(&self.id.pool, &self.id.name).await?;
            let volume = volume.ok_or_else(|| Error::not_found("volume", &self.id))?;
            // A pod may have begun to use it meanwhile.
            self.check_unused(&volume)?;
            sent = self.sent(&volume).await?;
        }
        let Some(snapshot) = sent else {
            return Err(self.was_written());
        };
        if self.options.delete_source {
            self.confirm(&snapshot)?;
            self.check_same(&volume, &snapshot).await?;
            self.delete().await?;
            answer.source_deleted = true;
        }
        answer.snapshot = Some(snapshot);
        Ok(())
    }

    fn was_written(&self) -> Error {
        let problem = format!(
            "was written since it was sent to {}: end the pods that use it, and send it by \
             `blockd replicate`",
            self.options.receiver
        );
        Error::in_use(format_args!("volume {}", self.id), problem)
    }

    /// Refuses a volume that is another one, is used, or was written, since the receiver was asked.
    async fn check_same(&self, volume: &v1::Volume, snapshot: &str) -> Result<(), Error> {
        let now = self.daemon.find_volume(&self.id.pool, &self.id.name).await?;
        let now = now.filter(|now| now.id == volume.id);
        let now = now.ok_or_else(|| Error::not_found("volume", &self.id))?;
        self.check_unused(&now)?;
        match self.sent(&now).await? {
            Some(newest) if newest == snapshot => Ok(()),
            _ => Err(self.was_written()),
        }
    }

    fn check_unused(&self, volume: &v1::Volume) -> Result<(), Error> {
        if !volume.attached && volume.connections == 0 {
            return Ok(());
        }
        let problem = "is attached: end the pods that use it, then repeat this. `blockd replicate` \
                       sends most of it meanwhile, so that the last part is short";
        Err(Error::in_use(format_args!("volume {}", self.id), problem))
    }

    /// The snapshots that the receiver has.
    async fn snapshots(&self) -> Result<Vec<v1::Volume>, Error> {
        let mut all = self.daemon.volumes(&self.id.pool).await?;
        let prefix = format!("{}@", self.id.name);
        all.retain(|one| {
            one.kind() == v1::VolumeKind::Snapshot
                && one.name.starts_with(&prefix)
                && one.labels.get(SENT) == Some(&self.options.receiver)
        });
        all.sort_by_key(|one| one.id);
        Ok(all)
    }

    /// The newest snapshot that the receiver has, if the volume is still as it was then.
    async fn sent(&self, volume: &v1::Volume) -> Result<Option<String>, Error> {
        let Some(newest) = self.snapshots().await?.pop() else { return Ok(None) };
        if newest.size_bytes != volume.size_bytes {
            return Ok(None);
        }
        let request = v1::DiffVolumeRequest {
            name: volume.name.clone(),
            pool: volume.pool.clone(),
            since: newest.name.clone(),
            from_bytes: 0,
        };
        let mut parts = self.daemon.diff_volume(request).await?;
        while let Some(part) = parts.next().await? {
            if part.ranges.iter().any(|one| one.state() != v1::RangeState::Same) {
                return Ok(None);
            }
        }
        Ok(Some(newest.name))
    }

    fn replicate(&self) -> Result<(), Error> {
        self.blockd(&["replicate", &self.id.name, &self.options.receiver]).map(|_| ())
    }

    /// Asks the receiver whether it has all of a snapshot: sending it once more sends nothing then.
    fn confirm(&self, snapshot: &str) -> Result<(), Error> {
        let what = format!("snapshot {snapshot}");
        let answer = self.blockd(&["send", snapshot, &self.options.receiver]);
        let answer = answer.map_err(|error| {
            let problem = format!(
                "is not confirmed by the receiver: {error}. If pods have used the volume there \
                 already, delete it here by `blockd del`"
            );
            Error::in_use(&what, problem)
        })?;
        let answer: Value = serde_json::from_slice(&answer)
            .map_err(|error| Error::unexpected("read the answer of blockd send:", error))?;
        if answer.get("written_bytes").is_some_and(Value::is_null) {
            return Ok(());
        }
        let problem = "was sent anew, as the receiver did not have it: look at the volume there, \
                       then repeat this";
        Err(Error::in_use(&what, problem))
    }

    /// The volume goes first: without it a repeat knows that only snapshots can be left.
    async fn delete(&self) -> Result<(), Error> {
        self.delete_one(&self.id.name).await?;
        self.delete_snapshots().await
    }

    async fn delete_snapshots(&self) -> Result<(), Error> {
        for one in self.snapshots().await? {
            self.delete_one(&one.name).await?;
        }
        Ok(())
    }

    async fn delete_one(&self, name: &str) -> Result<(), Error> {
        let (name, pool) = (name.to_owned(), self.id.pool.clone());
        let request = v1::DeleteVolumeRequest { name, pool, force: false, ..Default::default() };
        self.daemon.delete_volume(request).await.map(|_| ())
    }

    /// Runs the program, and returns the JSON that it prints. Its progress is shown at a terminal.
    /// The thread waits for it: there is nothing else to do in this process.
    fn blockd(&self, words: &[&str]) -> Result<Vec<u8>, Error> {
        let what = format!("{} {}", shown(self.options.blockd.display()), words[0]);
        let shows = std::io::stderr().is_terminal();
        let mut command = Command::new(&self.options.blockd);
        command.arg("--json").arg("--socket").arg(&self.options.blockd_socket).args(words);
        command.args(["--pool", &self.id.pool]).args(&self.options.more);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(if shows { Stdio::inherit() } else { Stdio::piped() });
        let output = command.output().map_err(|error| Error::io(&what, error))?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let said = if said.is_empty() { output.status.to_string() } else { said };
        Err(Error::Unexpected { what, problem: cut(said, MAX_ERROR_BYTES) })
    }
}
