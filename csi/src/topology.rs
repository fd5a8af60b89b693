//! Where volumes can be reached: on this node alone.

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

    /// Whether a topology has this node in it. Keys do not differ by case.
    #[must_use]
    pub fn is_in(&self, topology: &Topology) -> bool {
        let mut segments = topology.segments.iter();
        segments.all(|(key, value)| key.eq_ignore_ascii_case(&self.key) && *value == self.node)
    }

    /// Refuses requirements that exclude this node. Preferences exclude nothing.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED: the volume is wanted elsewhere.
    pub fn check(&self, wanted: Option<&TopologyRequirement>) -> Result<(), Error> {
        let Some(wanted) = wanted else { return Ok(()) };
        for (field, list) in [("requisite", &wanted.requisite), ("preferred", &wanted.preferred)] {
            let field = format!("accessibility_requirements.{field}");
            limits::list(&field, list.len(), limits::MAX_TOPOLOGIES)?;
            for topology in list {
                limits::map(&field, &topology.segments)?;
            }
        }
        if wanted.requisite.is_empty() || wanted.requisite.iter().any(|one| self.is_in(one)) {
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
        let error = check(&[&there], &[]).unwrap_err().to_string();
        assert_eq!(error, "no volume can be made in d/node=n2: this is node n1");
    }
}
