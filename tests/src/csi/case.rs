//! Cases, and their preconditions.

use anyhow::Result;
use blockd_csi::proto::controller_service_capability::rpc::Type as Controller;
use blockd_csi::proto::group_controller_service_capability::rpc::Type as Group;
use blockd_csi::proto::node_service_capability::rpc::Type as Node;
use blockd_csi::proto::plugin_capability::service::Type as Plugin;

use super::cx::Cx;
use super::driver::Offers;
use super::{Options, Verdict};

/// One sentence of the specification, or one row, and how it is looked at.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) file: &'static str,
    /// The needs of all cases of its file, and its own.
    pub(super) needs: [&'static [Need]; 2],
    pub(super) run: fn(&mut Cx<'_>) -> Result<()>,
}

/// A precondition of a case.
#[derive(Clone, Copy, Debug)]
pub(super) enum Need {
    Plugin(Plugin),
    Controller(Controller),
    Node(Node),
    Group(Group),
    /// Volumes may be staged and published here.
    Host,
    /// The specification leaves it open, and a row of this project does not.
    Rows,
    /// A mutable parameter was named.
    Mutable,
}

pub(super) const CREATE: Need = Need::Controller(Controller::CreateDeleteVolume);
pub(super) const LIST: Need = Need::Controller(Controller::ListVolumes);
pub(super) const GET: Need = Need::Controller(Controller::GetVolume);
pub(super) const CAPACITY: Need = Need::Controller(Controller::GetCapacity);
pub(super) const SNAPSHOT: Need = Need::Controller(Controller::CreateDeleteSnapshot);
pub(super) const LIST_SNAPSHOTS: Need = Need::Controller(Controller::ListSnapshots);
pub(super) const GET_SNAPSHOT: Need = Need::Controller(Controller::GetSnapshot);
pub(super) const CLONE: Need = Need::Controller(Controller::CloneVolume);
pub(super) const EXPAND: Need = Need::Controller(Controller::ExpandVolume);
pub(super) const MODIFY: Need = Need::Controller(Controller::ModifyVolume);
pub(super) const MODES: Need = Need::Controller(Controller::SingleNodeMultiWriter);
pub(super) const TOPOLOGY: Need = Need::Plugin(Plugin::VolumeAccessibilityConstraints);
pub(super) const GROUP: Need = Need::Group(Group::CreateDeleteGetVolumeGroupSnapshot);
pub(super) const CHANGES: Need = Need::Plugin(Plugin::SnapshotMetadataService);
pub(super) const STAGE: Need = Need::Node(Node::StageUnstageVolume);
pub(super) const NODE_MODES: Need = Need::Node(Node::SingleNodeMultiWriter);
pub(super) const STATS: Need = Need::Node(Node::GetVolumeStats);
pub(super) const CONDITION: Need = Need::Controller(Controller::VolumeCondition);
pub(super) const NODE_CONDITION: Need = Need::Node(Node::VolumeCondition);
pub(super) const NODE_EXPAND: Need = Need::Node(Node::ExpandVolume);

/// Ends a case that finds only under way that the driver lacks its subject.
#[derive(Debug)]
pub struct NotOffered(pub String);

impl std::fmt::Display for NotOffered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "not offered: {}", self.0)
    }
}

impl std::error::Error for NotOffered {}

impl Case {
    /// Why it is not for this driver, or not for this run.
    pub(super) fn reason_not_to_run(&self, offers: &Offers, options: &Options) -> Option<Verdict> {
        let needs = || self.needs.iter().copied().flatten();
        let asked = needs().find_map(|need| match need {
            Need::Host if options.skip_node => Some("nothing is to be staged or published"),
            Need::Rows if !options.rows => Some("only the specification was asked for"),
            Need::Mutable if options.mutable_parameters.is_empty() => {
                Some("no mutable parameter was named")
            }
            _ => None,
        });
        let on_host = needs().any(|need| matches!(need, Need::Host));
        let for_devices = || (options.only_host && !on_host).then_some("it needs no device");
        let asked = asked.or_else(for_devices);
        if let Some(why) = asked {
            return Some(Verdict::NotRun(why.to_owned()));
        }
        let missing = needs().find_map(|need| match need {
            Need::Plugin(service) => {
                (!offers.plugin.contains(&i32::from(*service))).then(|| service.as_str_name())
            }
            Need::Controller(rpc) => {
                (!offers.controller.contains(&i32::from(*rpc))).then(|| rpc.as_str_name())
            }
            Need::Node(rpc) => (!offers.node.contains(&i32::from(*rpc))).then(|| rpc.as_str_name()),
            Need::Group(rpc) => {
                (!offers.group.contains(&i32::from(*rpc))).then(|| rpc.as_str_name())
            }
            Need::Host | Need::Rows | Need::Mutable => None,
        });
        missing.map(|name| Verdict::NotOffered(name.to_owned()))
    }
}

/// The table of a file's cases: what all of them need, then each with what it needs besides.
macro_rules! cases {
    ($all:tt $($name:ident $(: $($need:expr),+)?;)+) => {
        pub(in crate::csi) const CASES: &[crate::csi::case::Case] = &[$(
            crate::csi::case::Case {
                name: stringify!($name),
                file: file!(),
                needs: [&$all, &[$($($need),+)?]],
                run: $name,
            },
        )+];
    };
}
pub(super) use cases;
