//! Which workers serve which pools: any of them, but for pools in memory that is nearer to some
//! processors than to others. Those are served by workers that stay on the near ones (P5).

use std::collections::BTreeMap;

/// Where workers stay, and which are near to which pool.
#[derive(Debug, Default)]
pub(super) struct Placement {
    /// The processors of each node that has any.
    nodes: Vec<Vec<usize>>,
    workers: usize,
    /// Workers near a pool, by its identity. Only pools in persistent memory are here, and one
    /// that was closed stays, for when it is opened again.
    near: BTreeMap<[u8; 16], Vec<usize>>,
}

impl Placement {
    pub(super) const fn new(nodes: Vec<Vec<usize>>, workers: usize) -> Self {
        Self { nodes, workers, near: BTreeMap::new() }
    }

    /// The processors of a worker, once workers stay anywhere: nodes have them in turn.
    pub(super) fn home(&self, worker: usize) -> &[usize] {
        self.nodes.get(worker % self.nodes.len().max(1)).map_or(&[], Vec::as_slice)
    }

    /// Notes a pool and the processors near its memory. True when that is the first such pool, and
    /// workers are to stay home from now on. With one node, or fewer workers than nodes, all of
    /// them serve everything from anywhere.
    pub(super) fn note(&mut self, pool: [u8; 16], cpus: &[usize]) -> bool {
        if self.nodes.len() < 2 || self.workers < self.nodes.len() {
            return false;
        }
        let is_near = |worker: &usize| self.home(*worker).iter().any(|cpu| cpus.contains(cpu));
        let near: Vec<usize> = (0..self.workers).filter(is_near).collect();
        if near.is_empty() {
            return false;
        }
        let is_first = self.near.is_empty();
        self.near.insert(pool, near);
        is_first
    }

    /// The workers that may serve a pool's connections and queues.
    pub(super) fn workers(&self, pool: &[u8; 16]) -> Vec<usize> {
        match self.near.get(pool) {
            Some(near) if !near.is_empty() => near.clone(),
            _ => (0..self.workers.max(1)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAR: [u8; 16] = [1; 16];
    const NEAR: [u8; 16] = [2; 16];

    /// Row: P5.
    #[test]
    fn a_pool_is_served_by_workers_near_its_memory() {
        let mut placement = Placement::new(vec![vec![0, 1], vec![2, 3]], 5);
        assert!(placement.note(NEAR, &[2, 3]));
        let homes: Vec<&[usize]> = (0..5).map(|worker| placement.home(worker)).collect();
        assert_eq!(homes, [&[0, 1], &[2, 3], &[0, 1], &[2, 3], &[0, 1]]);
        let of = |pool| placement.workers(&pool);
        assert_eq!((of(NEAR), of(FAR)), (vec![1, 3], vec![0, 1, 2, 3, 4]));
        assert!(!placement.note(FAR, &[0]), "they are home already");
        assert_eq!(placement.workers(&FAR), [0, 2, 4]);
    }

    /// Row: P5.
    #[test]
    fn where_nothing_is_nearer_all_serve_everything() {
        let one = vec![vec![0, 1]];
        let three = vec![vec![0], vec![1], vec![2]];
        for (nodes, workers, cpus) in [
            (one, 4, vec![0, 1]),
            (three.clone(), 2, vec![1]),
            (three.clone(), 3, vec![]),
            (three, 3, vec![7]),
            (vec![], 1, vec![0]),
        ] {
            let mut placement = Placement::new(nodes, workers);
            assert!(!placement.note(NEAR, &cpus), "{placement:?}");
            assert_eq!(placement.workers(&NEAR), (0..workers).collect::<Vec<_>>());
        }
    }
}
