"""The Kubernetes operator of EcoServe: custom resources, controller, and the objects it makes."""
