"""The train service: distributed, fault-tolerant runs whose order of rows is a pure function of position."""
