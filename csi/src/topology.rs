//! Where volumes can be reached: on this node alone, or on all nodes of a volume group.

use std::collections::HashMap;

use blockd_csi_base::error::shown;

use crate::error::Error;
use crate::limits;
use crate::proto::{Topology, TopologyRequirement};

/// Where this plugin is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// The key of the topology: the driver's name and `/node`.
    pub key: String,
    /// The node's id.
    pub node: String,
}

impl Place {
    /// The node of that id, for the driver of that name.
    #[must_use]
    pub fn new(driver: &str, node: &str) -> Self {
        Self { key: format!("{driver}/node"), node: node.to_owned() }
    }

    /// Converts it to a message.
    #[must_use]
    pub fn to_wire(&self) -> Topology {
        Topology { segments: HashMap::from([(self.key.clone(), self.node.clone())]) }
    }

    /// Whether a topology has this node in it. Keys do not differ by case. Those of the volume
    /// groups of a node stand beside its own, and say nothing more.
    #[must_use]
    pub fn is_in(&self, topology: &Topology) -> bool {
        let is_here = |(key, value): (&String, &String)| {
            key.eq_ignore_ascii_case(&self.key) && *value == self.node
        };
        let segments = &topology.segments;
        segments.is_empty()
            || segments.iter().any(is_here)
                && segments.iter().all(|(key, value)| is_here((key, value)) || self.is_group(key))
    }

    /// Whether nodes of the volume group with this key are in a topology.
    #[must_use]
    pub fn is_in_group(&self, topology: &Topology, group: &str) -> bool {
        let is_its =
            |(key, value): (&String, &String)| key.eq_ignore_ascii_case(group) && value == "true";
        let is_ours = |key: &String| key.eq_ignore_ascii_case(&self.key) || self.is_group(key);
        let segments = &topology.segments;
        self.is_in(topology) || segments.iter().any(is_its) && segments.keys().all(is_ours)
    }

    /// Whether a key is of a volume group of this driver.
    fn is_group(&self, key: &str) -> bool {
        let driver = self.key.trim_end_matches("node");
        let begins = key.get(..driver.len()).is_some_and(|it| it.eq_ignore_ascii_case(driver));
        begins && key[driver.len()..].to_ascii_lowercase().starts_with("vg.")
    }

    /// Refuses requirements that exclude this node. Preferences exclude nothing.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED: the volume is wanted elsewhere.
    pub fn check(&self, wanted: Option<&TopologyRequirement>) -> Result<(), Error> {
        self.check_by(wanted, |one| self.is_in(one))
    }

    /// Refuses requirements that exclude all nodes of the volume group with this key.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn check_group(
        &self,
        wanted: Option<&TopologyRequirement>,
        group: &str,
    ) -> Result<(), Error> {
        self.check_by(wanted, |one| self.is_in_group(one, group))
    }

    fn check_by(
        &self,
        wanted: Option<&TopologyRequirement>,
        is_in: impl Fn(&Topology) -> bool,
    ) -> Result<(), Error> {
        let Some(wanted) = wanted else { return Ok(()) };
        for (field, list) in [("requisite", &wanted.requisite), ("preferred", &wanted.preferred)] {
            let field = format!("accessibility_requirements.{field}");
            limits::list(&field, list.len(), limits::MAX_TOPOLOGIES)?;
            for topology in list {
                limits::map(&field, &topology.segments)?;
            }
        }
        if wanted.requisite.is_empty() || wanted.requisite.iter().any(is_in) {
            return Ok(());
        }
        let mut segments: Vec<String> = wanted
            .requisite
            .iter()
            .flat_map(|one| &one.segments)
            .take(4)
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        segments.sort();
        let place = format!("in {}", shown(segments.join(", ")));
        Err(Error::Elsewhere { place, node: self.node.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(segments: &[(&str, &str)]) -> Topology {
        let segments = segments.iter().map(|(key, value)| ((*key).into(), (*value).into()));
        Topology { segments: segments.collect() }
    }

    #[test]
    fn a_requirement_without_this_node_is_refused() {
        let place = Place::new("d", "n1");
        let here = topology(&[("d/node", "n1")]);
        let there = topology(&[("d/node", "n2")]);
        let other = topology(&[("zone", "z")]);
        let both = topology(&[("d/node", "n1"), ("zone", "z")]);
        let check = |requisite: &[&Topology], preferred: &[&Topology]| {
            let list = |list: &[&Topology]| list.iter().map(|&one| one.clone()).collect();
            let wanted =
                TopologyRequirement { requisite: list(requisite), preferred: list(preferred) };
            place.check(Some(&wanted))
        };
        assert!(place.check(None).is_ok());
        assert!(place.is_in(&place.to_wire()));
        for requisite in [&[][..], &[&here], &[&there, &here], &[&topology(&[])]] {
            assert!(check(requisite, &[]).is_ok(), "{requisite:?}");
        }
        assert!(check(&[], &[&there]).is_ok());
        for requisite in [&[&there][..], &[&other], &[&both], &[&there, &other]] {
            let error = check(requisite, &[]).unwrap_err();
            assert_eq!(error.code(), tonic::Code::ResourceExhausted, "{requisite:?}");
        }
        // As the nodes of a volume group report themselves.
        let shared = topology(&[("d/node", "n1"), ("d/vg.san", "true")]);
        assert!(check(&[&shared], &[]).is_ok());
        let away = topology(&[("d/node", "n2"), ("d/vg.san", "true")]);
        let group = topology(&[("d/vg.san", "true")]);
        for requisite in [&away, &group, &topology(&[("d/vg.san", "true"), ("zone", "z")])] {
            assert!(check(&[requisite], &[]).is_err(), "{requisite:?}");
        }
        for (one, is_in) in [
            (&here, true),
            (&there, false),
            (&shared, true),
            (&away, true),
            (&group, true),
            (&both, false),
            (&topology(&[("d/node", "n2"), ("d/vg.other", "true")]), false),
            (&topology(&[("d/vg.san", "true"), ("zone", "z")]), false),
        ] {
            assert_eq!(place.is_in_group(one, "d/vg.san"), is_in, "{one:?}");
        }
        let error = check(&[&there], &[]).unwrap_err().to_string();
        assert_eq!(error, "no volume can be made in d/node=n2: this is node n1");
    }
}
