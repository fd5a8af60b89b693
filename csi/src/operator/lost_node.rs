//! `blockd-csi lost-node`: what is stuck in the cluster by the volumes of a node that is gone, and
//! the commands that release it.

use std::fmt::Write as _;
use std::path::PathBuf;

use blockd_csi_base::options::{DEFAULT_DRIVER, check_driver};
use clap::Parser;
use serde::Serialize;

use super::pv::{List, PersistentVolume};
use super::{SET, delete_pv, part_of, print, quoted};
use crate::error::Error;
use crate::topology::Place;

/// Lists the PersistentVolumes that can be used on a node alone which is gone for good, and prints
/// the commands that release their claims. It changes nothing itself, and calls no daemon: it runs
/// anywhere. The commands stop while the node is Ready, and leave an object alone that is another
/// one by then than in the list.
#[derive(Clone, Parser, Debug)]
#[command(
    name = "blockd-csi lost-node",
    max_term_width = 100,
    after_help = "Example:\n  kubectl get pv -o json | blockd-csi lost-node worker-3 --pv-list -"
)]
pub struct Options {
    /// The node's name
    pub node: String,

    /// The PersistentVolumes of the cluster, as `kubectl get pv -o json` prints them: a file, or
    /// "-" for standard input
    #[arg(long, value_name = "FILE")]
    pub pv_list: PathBuf,

    /// Release volumes with the reclaim policy Retain too. Without it they are listed only: their
    /// class says that data is not given up with its claim
    #[arg(long)]
    pub retained: bool,

    /// Name of the driver, as in the CSIDriver object
    #[arg(long, value_name = "NAME", default_value = DEFAULT_DRIVER)]
    pub driver_name: String,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The answer.
#[derive(Serialize, Debug)]
pub struct Answer {
    node: String,
    volumes: Vec<Stuck>,
    /// Commands of a shell, in the order in which they are to be run.
    commands: Vec<String>,
}

/// A PersistentVolume of the node.
#[derive(Serialize, Debug)]
struct Stuck {
    persistent_volume: String,
    volume_id: String,
    /// NAMESPACE/NAME.
    claim: Option<String>,
    reclaim_policy: &'static str,
    /// Whether the claim is bound to it. Otherwise one of its name is another claim.
    bound: bool,
    /// Whether the commands release it.
    released: bool,
}

impl Options {
    /// Prints the answer.
    ///
    /// # Errors
    /// An option is out of range, or the list can't be read.
    pub fn run(&self) -> Result<(), Error> {
        check_driver(&self.driver_name)?;
        crate::options::check_node("NODE", &self.node)?;
        let list = List::read(&self.pv_list, &self.driver_name)?;
        let answer = self.answer(&list);
        print(self.json.then_some(&answer), || answer.script())
    }

    /// Finds the volumes of the node.
    #[must_use]
    pub fn answer(&self, list: &List) -> Answer {
        let Place { key, node } = Place::new(&self.driver_name, &self.node);
        let of_node = list.volumes.iter().filter(|one| one.is_only_on(&key, &node));
        let is_released = |one: &PersistentVolume| self.retained || one.is_deleted_with_claim();
        let mut commands = vec![SET.to_owned(), refuse_ready(&node)];
        let mut volumes = Vec::new();
        for one in of_node {
            let released = is_released(one);
            if released {
                commands.push(release(one));
            }
            volumes.push(Stuck {
                persistent_volume: one.name().to_owned(),
                volume_id: one.handle().to_owned(),
                claim: one.claim().map(|(namespace, name)| format!("{namespace}/{name}")),
                reclaim_policy: if one.is_deleted_with_claim() { "Delete" } else { "Retain" },
                bound: one.is_bound(),
                released,
            });
        }
        Answer { node, volumes, commands }
    }
}

/// The command that ends the script while the node runs.
fn refuse_ready(node: &str) -> String {
    let status = r#".status.conditions[?(@.type=="Ready")].status"#;
    let text = format!("node {node} is Ready: its volumes are in use, and nothing was released");
    format!(
        "{}\nif [ \"$ready\" = True ]; then\n  echo {} >&2\n  exit 1\nfi",
        part_of("ready", &format!("node {}", quoted(node)), status),
        quoted(&text)
    )
}

/// The command that releases one. The list may be old: a volume that was moved has a new object of
/// the same name by then, and a claim that was made again has its volume elsewhere, so both are
/// compared by their UIDs. The claim goes first, so that no new pod is bound to the volume; its
/// finalizer waits for pods that use it, hence it is not waited for.
fn release(volume: &PersistentVolume) -> String {
    let pv = quoted(volume.name());
    let mut commands = Vec::new();
    let claim = volume.claim().zip(volume.claim_uid()).filter(|_| volume.is_bound());
    if let Some(((namespace, name), uid)) = claim {
        let object = format!("pvc --namespace {} {}", quoted(namespace), quoted(name));
        commands.push(part_of("claim", &object, ".metadata.uid"));
        commands.push(format!(
            "[ \"$claim\" != {} ] || kubectl delete {object} --ignore-not-found --wait=false",
            quoted(uid)
        ));
    }
    // The finalizers are those of the provisioner, which ran on the node, and of the protection of
    // a volume whose claim is not gone yet.
    commands.extend(delete_pv(&pv, volume.uid()));
    let text = format!("PersistentVolume {} is not the one of the list: kept", volume.name());
    format!(
        "{}\nif [ \"$uid\" = {} ]; then\n  {}\nelif [ -n \"$uid\" ]; then\n  echo {} >&2\nfi",
        part_of("uid", &format!("pv {pv}"), ".metadata.uid"),
        quoted(volume.uid()),
        commands.join("\n  "),
        quoted(&text)
    )
}

impl Answer {
    /// The answer as a script, with the volumes in comments.
    #[must_use]
    pub fn script(&self) -> String {
        let mut text = format!("{SET}\n");
        let count = self.volumes.iter().filter(|one| one.released).count();
        let _ = writeln!(
            text,
            "# {} PersistentVolumes are on node {} alone; the commands release {count} of them, \
             whose data is given up.",
            self.volumes.len(),
            self.node
        );
        for one in &self.volumes {
            let line = |text: &str| text.chars().filter(|c| !c.is_control()).collect::<String>();
            let kept = if one.released { "" } else { ", kept: --retained releases it too" };
            let claim = match &one.claim {
                Some(claim) if one.bound => claim.clone(),
                Some(claim) => format!("{claim} before, which is gone"),
                None => "none".to_owned(),
            };
            let _ = writeln!(
                text,
                "# {}: volume {}, claim {}, reclaim policy {}{kept}",
                line(&one.persistent_volume),
                line(&one.volume_id),
                line(&claim),
                one.reclaim_policy
            );
        }
        for command in self.commands.iter().filter(|command| *command != SET) {
            let _ = writeln!(text, "{command}");
        }
        text
    }
}
